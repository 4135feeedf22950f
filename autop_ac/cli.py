"""The command line: plan for a cluster on one machine, and see what activation checkpointing does.

``autop-ac report model.py:build --mesh 8,4 --device-spec H100`` and its like; ``build()`` gives the model and
the function that makes its inputs. Nothing is compiled or run, no GPU is needed.

Exit status: 0, 1 where a limit cannot be met or the step does not fit the device, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .api import AutoParallel
from .config import ACConfig
from .errors import AutopACError, InfeasibleError, UsageError
from .report.compare import Compared, compare_table
from .report.plan_table import plan_table
from .report.text import size
from .report.values import ACReport
from .runtime.launch import fake_mesh
from .sharding.plan import ShardingPlan

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

_BUILT = ("mp_policy", "reshard_after_forward", "loss_fn", "inputs", "outputs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after the program's name; None for those of this process.

    Returns:
        The exit status.
    """
    try:
        args = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autop-ac",
        description="Plan sharding and activation checkpointing for a mesh that need not be there.",
        epilog="Exit status: 0 ok, 1 infeasible or does not fit the device, 2 wrong use.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], words: str) -> Any:
        made = commands.add_parser(name, help=words, description=words)
        made.set_defaults(command=run)
        made.add_argument(
            "target",
            metavar="MODULE.py:BUILD",
            help="a function, in a file or an importable module, that gives (model, input_fn), or with "
            f"a dict of {', '.join(_BUILT)} as a third",
        )
        if name == "explain":
            made.add_argument("asked", nargs="+", metavar="NAME",
                              help="a module path or glob, a tensor's or a parameter's name")  # fmt: skip
        _add_common(made, several=name == "compare")
        if name in ("plan", "report"):
            made.add_argument("--html", metavar="FILE", help="write the report as one page")
            made.add_argument("--json", metavar="FILE", help="write the report as JSON")
        if name == "compare":
            made.add_argument(
                "--with", dest="names", metavar="NAMES", default=",".join(COMPARED),
                help=f"which of {', '.join(COMPARED)}, joined by commas; flags of activation "
                "checkpointing make one more, and so does each --config",
            )  # fmt: skip
        ACConfig.add_arguments(made)
        return made

    command("plan", _plan, "Where each parameter lies, and what a step takes.")
    command("report", _report, "What is kept and recomputed, why, and what a step takes.")
    command("compare", _compare, "Several settings of activation checkpointing in one table.")
    command("explain", _explain, "Why values of a module, or one value, are kept or recomputed.")
    return parser


def _add_common(parser: argparse.ArgumentParser, several: bool) -> None:
    parser.add_argument(
        "--mesh", type=_sizes, default=(1,), metavar="8,4", help="devices of each axis"
    )
    parser.add_argument("--axes", metavar="dp,tp", help="names of the axes")
    parser.add_argument("--device-spec", default="H100", metavar="NAME",
                        help="the device planned for: A100, H100 (the default), H200, B200, cpu")  # fmt: skip
    parser.add_argument("--parameter-memory", type=float, metavar="F",
                        help="most parameter bytes of one device, as a fraction of all")  # fmt: skip
    parser.add_argument("--compile", choices=("inductor", "eager"), default="inductor",
                        help="whose operators the graph is made of")  # fmt: skip
    parser.add_argument("--meta", action="store_true",
                        help="build the model on the meta device, without memory")  # fmt: skip
    parser.add_argument("--config", metavar="FILE", action="append" if several else "store",
                        help="settings of activation checkpointing from a TOML file; flags go first")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")


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


# commands


def _plan(args: argparse.Namespace) -> int:
    ap, plan = _searched(args, _settings(args))
    print(plan_table(plan))
    return _told(args, ap.ac_report)


def _report(args: argparse.Namespace) -> int:
    ap, _ = _searched(args, _settings(args))
    print(ap.ac_report)
    return _told(args, ap.ac_report)


def _explain(args: argparse.Namespace) -> int:
    ap, _ = _searched(args, _settings(args))
    print("\n\n".join(str(ap.explain(asked)) for asked in args.asked))
    return OK


def _told(args: argparse.Namespace, report: ACReport) -> int:
    estimate = report.estimate()
    print(replace(estimate, notes=()))  # which are told above
    for path in (args.html, args.json):
        if path is not None:
            print(f"wrote {report.save(path)}", file=sys.stderr)
    if estimate.fits:
        return OK
    print(
        f"autop-ac: the predicted peak of {size(estimate.peak_bytes)} does not fit the "
        f"{size(estimate.usable_bytes)} usable of {estimate.device}: try --memory-budget device, "
        f"--parameter-memory {1 / estimate.devices:.3g} to shard all parameters, or a larger --mesh",
        file=sys.stderr,
    )
    return UNFIT


def _compare(args: argparse.Namespace) -> int:
    configs = _compared(args)
    ap, _ = _searched(args, next(iter(configs.values())))
    rows = []
    fits = False
    for name, config in configs.items():
        words = WORDS.get(name, "from its file")
        try:
            report = ap.configure_ac(config).preview()
            for note in report.basis.plan.notes:
                warnings.warn(note, UserWarning, stacklevel=1)
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
            near = difflib.get_close_matches(name, COMPARED, n=1)
            raise UsageError(
                f"--with {name!r}: known are {', '.join(COMPARED)}"
                + (f"; did you mean {near[0]}?" if near else "")
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
    """The plan of the model that the target builds."""
    model, input_fn, options = _built(args)
    mesh = fake_mesh(args.mesh, args.axes.split(",") if args.axes else None)
    placed = {name: options.pop(name, None) for name in ("inputs", "outputs")}
    ap = AutoParallel(model, input_fn, mesh, **options)
    ap.configure_ac(config).configure_compile(args.compile).configure_device(args.device_spec)
    with ap.configure_progress(not args.quiet):
        if placed["inputs"] is not None:
            ap.add_input_constraints(placed["inputs"])
        if placed["outputs"] is not None:
            ap.add_output_constraints(placed["outputs"])
        if args.parameter_memory is not None:
            ap.add_parameter_memory_constraint(0.0, args.parameter_memory)
        return ap, ap.optimize_placement()


def _built(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    build = _function(args.target)
    try:
        with torch.device("meta") if args.meta else nullcontext():
            made = build()
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{args.target} raised {type(error).__name__}, as told above") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(
            f"{args.target} gave {type(made).__name__}: it is to give (model, input_fn), or "
            "(model, input_fn, options)"
        )
    options = dict(made[2]) if len(made) == 3 else {}
    if unknown := sorted(options.keys() - set(_BUILT)):
        raise UsageError(f"{args.target} gave options {unknown}: known are {', '.join(_BUILT)}")
    return made[0], made[1], options


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon:
        raise UsageError(f"{target!r}: name the function behind a colon, such as model.py:build")
    path = Path(where)
    try:
        if path.suffix == ".py":
            module = _from_file(path)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(where)
    except Exception as error:
        traceback.print_exc()
        raise UsageError(f"{where} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [n for n in vars(module) if n[0] != "_"], n=1)
        told = f"; nearest is {near[0]}" if near else ""
        raise UsageError(f"{where} has no function {name!r}{told}")
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as when Python runs the file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "the ending is .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module
