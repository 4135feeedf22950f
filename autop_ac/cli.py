"""The command line: plan for a cluster on one machine, and see what activation checkpointing does.

``autop-ac report model.py:build --mesh 8,4 --device-spec H100`` and its like; ``build()`` gives the model and
the function that makes its inputs. Nothing is compiled or run, no GPU is needed.

Exit status: 0, 1 where a limit cannot be met or the step does not fit the device, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from .api import AutoParallel
from .config import ACConfig
from .errors import AutopACError, InfeasibleError, UsageError
from .graph.devices import DEVICES, find_device
from .near import did_you_mean
from .report.compare import Compared, compare_table
from .report.plan_table import plan_table
from .report.text import size
from .report.values import ACReport
from .runtime.launch import fake_mesh
from .sharding.plan import ShardingPlan
from .target import OPTIONS, built

OK, UNFIT, WRONG = 0, 1, 2

COMPARED: Mapping[str, Mapping[str, Any]] = {
    "off": {"enable": False},
    "full": {"stage_size": None, "rules": ["**=recompute"]},
    "hints": {"stage_size": None},
    "staged": {"stage_size": "auto"},
    "half": {"memory_budget": 0.5},
    "budget": {"memory_budget": "device"},
}
"""Settings that `compare` knows by name."""

WORDS: Mapping[str, str] = {
    "off": "no activation checkpointing",
    "full": "all that may be is recomputed",
    "hints": "hints in the model alone",
    "staged": "stages, of the size of least peak",
    "half": "least recomputation within half of the peak with nothing recomputed",
    "budget": "least recomputation that fits the device",
    "given": "the flags",
}
"""What they are, for the lines below the table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; None for those of this process.

    Returns:
        The exit status.
    """
    try:
        args, rest = _parser().parse_known_args(argv)
        if rest:
            args.parser.error(
                f"unrecognized arguments: {' '.join(rest)}{_meant(rest, args.parser)}"
            )
    except SystemExit as stop:  # argparse has told what is wrong, or shown its help
        return int(stop.code or 0)
    if not args.quiet and not sys.stderr.isatty():  # a terminal has the display
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        with _without_remarks_on_collectives(), _warnings_as_lines():
            return command(args)
    except InfeasibleError as error:
        print(f"autop-ac: {error}", file=sys.stderr)
        return UNFIT
    except AutopACError as error:
        print(f"autop-ac: {error}", file=sys.stderr)
        return WRONG


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings of the library once each, as lines for people, not as Python shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", UserWarning)
        warnings.showwarning = lambda message, *_: print(f"autop-ac: {message}", file=sys.stderr)
        yield


@contextmanager
def _without_remarks_on_collectives() -> Iterator[None]:
    """What torch says of collectives is about how they run, and none runs here."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    """Tells the nearest of the words that a flag or the command may be."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = did_you_mean(found[1], re.findall(r"[\w-]+", found[2])) if found else ""
        self.exit(WRONG, f"{self.prog}: {message}{near}\nAll flags: {self.prog} --help\n")


def _meant(rest: Sequence[str], parser: argparse.ArgumentParser) -> str:
    known = re.findall(r"--[\w-]+", parser.format_usage())
    near = (did_you_mean(word.partition("=")[0], known) for word in rest if word.startswith("-"))
    return next(filter(None, near), "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autop-ac",
        description="Plan sharding and activation checkpointing for a mesh that need not be there.",
        epilog="Exit status: 0 ok, 1 infeasible or does not fit the device, 2 wrong use.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], words: str) -> Any:
        made = commands.add_parser(name, help=words, description=words)
        made.set_defaults(command=run, parser=made)
        made.add_argument(
            "target",
            metavar="FILE.py:FUNCTION",
            help="a function without arguments, in a file or an importable module, that returns "
            "(model, input_fn); input_fn() makes one batch for the whole mesh, of which only shapes "
            f"and dtypes are used. A dict of options may follow as a third: {', '.join(OPTIONS)}",
        )
        if name == "explain":
            made.add_argument("asked", nargs="+", metavar="NAME",
                              help="what to explain: a module path or a glob of some (layers.*.mlp), the "
                              "name of a parameter, or of a tensor in the graph")  # fmt: skip
        _add_common(made, several=name == "compare")
        if name in ("plan", "report"):
            made.add_argument("--html", type=_new_file, metavar="FILE",
                              help="write the report to FILE, as one page for a browser")  # fmt: skip
            made.add_argument("--json", type=_new_file, metavar="FILE",
                              help="write the report to FILE, as JSON")  # fmt: skip
        if name == "compare":
            made.add_argument(
                "--with", dest="names", metavar="NAMES", default=",".join(COMPARED),
                help=f"rows of the table, joined by commas: {', '.join(COMPARED)} (the default: all of "
                "them). Each --config is one more row, and so are the flags of activation "
                "checkpointing below, together",
            )  # fmt: skip
        ACConfig.add_arguments(made)
        return made

    command("plan", _plan, "Where each parameter lies on the mesh, and what a step takes.")
    command(
        "report",
        _report,
        "What is kept for backward and what is recomputed, and what a step takes.",
    )
    command("compare", _compare, "Several settings of activation checkpointing, in one table.")
    command("explain", _explain, "Why values of a module, or one value, are kept or recomputed.")
    return parser


def _add_common(parser: argparse.ArgumentParser, several: bool) -> None:
    parser.add_argument("--mesh", type=_sizes, metavar="8,4",
                        help="number of devices along each axis of the mesh (default: 1, a single device, "
                        "or the mesh of --plan)")  # fmt: skip
    parser.add_argument("--axes", metavar="dp,tp",
                        help="a name for each axis of --mesh (default: the library's own)")  # fmt: skip
    parser.add_argument("--device-spec", default="H100", metavar="NAME",
                        help=f"the device planned for: {', '.join(DEVICES)} (default: H100), or a TOML file "
                        "with its memory_bytes, memory_bandwidth and flops by dtype")  # fmt: skip
    parser.add_argument("--parameter-memory", type=_fraction, metavar="F",
                        help="at most this fraction of all parameter bytes on one device, above 0 and at "
                        "most 1 (default: no limit but the device's memory)")  # fmt: skip
    parser.add_argument("--plan", metavar="FILE",
                        help="take the sharding plan that --save-plan wrote, in place of a search")  # fmt: skip
    parser.add_argument("--save-plan", type=_new_file, metavar="FILE",
                        help="write the sharding plan to FILE, for --plan and ShardingPlan.load")  # fmt: skip
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor",
                        help="plan for graphs that Inductor compiles (the default), or that run operator "
                        "by operator; nothing is compiled here")  # fmt: skip
    parser.add_argument("--meta", action="store_true",
                        help="build the model on the meta device, so that its weights take no memory")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", action="append" if several else "store",
                        help="a TOML file with settings of activation checkpointing"
                        + ("; may be repeated" if several else "; flags go before it"))  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give sizes of axes joined by commas, such as 8,4"
        )
    return sizes


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:  # NaN compares as False
        raise argparse.ArgumentTypeError(f"{text!r}: give a fraction above 0 and at most 1, 0.125")
    return value


def _new_file(text: str) -> str:
    """A path that can be written, held before any work is done."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: give a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r}: there is no folder {path.parent}: make it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: no permission to write it")
    return text


# commands


def _plan(args: argparse.Namespace) -> int:
    ap, plan = _searched(args, _settings(args))
    print(plan_table(plan))
    return _told(args, _reported(args, ap, plan))


def _report(args: argparse.Namespace) -> int:
    report = _reported(args, *_searched(args, _settings(args)))
    print(report)
    return _told(args, report)


def _explain(args: argparse.Namespace) -> int:
    report = _reported(args, *_searched(args, _settings(args)))
    print("\n\n".join(str(report.explain(asked)) for asked in args.asked))
    return OK


def _reported(args: argparse.Namespace, ap: AutoParallel, plan: ShardingPlan) -> ACReport:
    """The report under the settings of this moment, its notes as warnings."""
    try:
        report = ap.preview(plan)
    except UsageError as error:
        if args.plan is None:
            raise
        raise UsageError(f"--plan {args.plan}: {error}") from error
    for note in report.basis.plan.notes:
        warnings.warn(note, UserWarning, stacklevel=1)
    return report


def _told(args: argparse.Namespace, report: ACReport) -> int:
    estimate = report.estimate()
    print(replace(estimate, notes=()))  # which are told above
    for path in (args.html, args.json):
        if path is not None:
            _write(path, report.save)
    if estimate.fits:
        return OK
    print(
        f"autop-ac: the predicted peak of {size(estimate.peak_bytes)} does not fit the "
        f"{size(estimate.usable_bytes)} usable of {estimate.device}: try --memory-budget device, "
        f"--parameter-memory {1 / estimate.devices:.3g} to shard all parameters, or a larger --mesh",
        file=sys.stderr,
    )
    return UNFIT


def _write(path: str, save: Callable[[str], object]) -> None:
    try:
        save(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _compare(args: argparse.Namespace) -> int:
    configs = _compared(args)
    ap, plan = _searched(args, next(iter(configs.values())))
    rows = []
    fits = False
    for name, config in configs.items():
        words = WORDS.get(name, "from its file")
        try:
            report = _reported(args, ap.configure_ac(config), plan)
        except InfeasibleError as error:
            rows.append(Compared(name, words, config, smallest_bytes=error.smallest_bytes))
            continue
        estimate = report.estimate()
        fits |= estimate.fits
        rows.append(Compared(name, words, config, estimate, report.kept_bytes))
    print(compare_table(rows))
    return OK if fits else UNFIT


def _compared(args: argparse.Namespace) -> dict[str, ACConfig]:
    """By name the settings to compare; an optimizer that is given counts in all of them."""
    state = {"optimizer": args.optimizer} if hasattr(args, "optimizer") else {}
    configs = {}
    for name in filter(None, args.names.split(",")):
        if name not in COMPARED:
            raise UsageError(
                f"--with {name!r}: known are {', '.join(COMPARED)}{did_you_mean(name, COMPARED)}"
            )
        configs[name] = ACConfig.from_dict({**COMPARED[name], **state})
    for path in args.config or ():
        configs[Path(path).stem] = replace(ACConfig.from_toml(path), **state)
    given = ACConfig.from_args(args)
    if given != ACConfig.from_dict(state):
        configs["given"] = given
    if not configs:
        raise UsageError("compare: nothing to compare; name settings by --with, --config or flags")
    return configs


# from words to a plan


def _settings(args: argparse.Namespace) -> ACConfig:
    base = None if args.config is None else ACConfig.from_toml(args.config)
    return ACConfig.from_args(args, base=base)


def _searched(args: argparse.Namespace, config: ACConfig) -> tuple[AutoParallel, ShardingPlan]:
    """The plan of the model that the target builds: searched for, or of a file."""
    device = find_device(args.device_spec)  # what words can be wrong in comes before the work
    saved = None if args.plan is None else ShardingPlan.load(args.plan)
    if saved is not None and args.parameter_memory is not None:
        raise UsageError(
            "--parameter-memory limits the search, and --plan leaves it out: drop one of them"
        )
    shape = args.mesh or (saved.mesh_shape if saved is not None else (1,))
    names = args.axes.split(",") if args.axes else None
    if names is not None and len(names) != len(shape):
        raise UsageError(
            f"--axes {args.axes}: give each axis a name; the mesh has {len(shape)} of them"
        )
    if saved is not None and names is None and shape == saved.mesh_shape:
        names = list(saved.axis_names)
    model, input_fn, options = built(args.target, args.meta)
    placed = {name: options.pop(name, None) for name in ("inputs", "outputs")}
    ap = AutoParallel(model, input_fn, fake_mesh(shape, names), **options)
    ap.configure_ac(config).configure_compile(args.compile).configure_device(device)
    with ap.configure_progress(not args.quiet):
        plan = saved if saved is not None else _search(ap, placed, args.parameter_memory)
    if args.save_plan is not None:
        _write(args.save_plan, plan.save)
    return ap, plan


def _search(ap: AutoParallel, placed: Mapping[str, Any], memory: float | None) -> ShardingPlan:
    if placed["inputs"] is not None:
        ap.add_input_constraints(placed["inputs"])
    if placed["outputs"] is not None:
        ap.add_output_constraints(placed["outputs"])
    if memory is not None:
        ap.add_parameter_memory_constraint(0.0, memory)
    return ap.optimize_placement()
