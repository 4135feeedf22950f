"""Hints written in model code: `ac_region`, as context manager and decorator; `checkpoint_name`.

While autop_ac captures a model, a region becomes an annotation on each node traced inside it,
under a key of its own (``autop_ac_region_<uid>``): nested annotations with one key would replace
each other, and with a growing uid the innermost region is the one with the largest. Values of an
annotation are strings, booleans and tuples of strings, because Dynamo keeps nothing else. A name
becomes an operator without a result that reads the value; capture takes it out of the joint graph and
leaves the name on the value. A sharding constraint becomes an operator too, and then an alias. Under
plain `torch.compile` regions and names do nothing; in eager the decorator checkpoints through
`torch.utils.checkpoint`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from . import _torch_annotate as private
from .errors import ConfigError, HintError
from .placements import placement_text
from .policies import Selector, check_name, conflicts, parse_selector, parse_selectors

REGION_PREFIX = "autop_ac_region_"
_OTHERWISE = ("recompute", "save", "auto")
# traced by themselves where Dynamo left the function around them to eager
_OWN_FRAMES = ("ac_region", "checkpoint_name", "__call__")

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=torch.Tensor)


class Entries:
    """Numbers the entries of regions, the later the larger, and keeps what was entered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._entered: dict[int, RegionSpec] = {}

    def enter(self, spec: RegionSpec) -> int:
        """The number of one more entry."""
        number = next(self._numbers)
        self._entered[number] = spec
        return number

    def without(self, numbers: Iterable[int]) -> tuple[RegionSpec, ...]:
        """The regions that no entry of those numbers is of: one that was entered again is not there."""
        held = {self._entered[n] for n in numbers}
        return tuple(dict.fromkeys(s for s in self._entered.values() if s not in held))


# None outside of a capture; inside, it numbers the entries of regions
_uids: ContextVar[Entries | None] = ContextVar("autop_ac_region_uids", default=None)


class ReadsHints:
    """Base of the backends of `torch.compile` that read hints: regions leave theirs for these.

    Attributes:
        entries: numbers the entries of regions.
    """

    def __init__(self) -> None:
        self.entries = Entries()


@private.constant_while_tracing
def compiled_by_ours() -> bool:
    """Whether Dynamo traces for a backend of ours now; a constant of the trace."""
    return isinstance(private.compiling_backend(), ReadsHints)


@contextlib.contextmanager
def capturing() -> Iterator[Entries]:
    """While open, regions that Dynamo traces in this thread leave their annotation."""
    entries = Entries()
    token = _uids.set(entries)
    try:
        yield entries
    finally:
        _uids.reset(token)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """What one `ac_region(...)` says, checked.

    Attributes:
        name: the user's name for it, or ``""``.
        save, recompute: selectors.
        otherwise: what happens to the rest: ``"recompute"``, ``"save"`` or ``"auto"``.
        prefer: a preference rather than an order.
        source: ``"file.py:12"``, or ``""``.
    """

    name: str
    save: tuple[Selector, ...]
    recompute: tuple[Selector, ...]
    otherwise: str
    prefer: bool
    source: str

    def annotation(self) -> dict[str, Any]:
        """The spec in plain strings, for ``node.meta["custom"]``."""
        return {
            "name": self.name,
            "save": tuple(map(str, self.save)),
            "recompute": tuple(map(str, self.recompute)),
            "otherwise": self.otherwise,
            "prefer": self.prefer,
            "source": self.source,
        }

    @property
    def label(self) -> str:
        """How messages call it: ``ac_region "attention"``."""
        return f'ac_region "{self.name}"' if self.name else "ac_region"


def read_annotation(value: dict[str, Any]) -> RegionSpec:
    """The inverse of `RegionSpec.annotation`."""
    return RegionSpec(
        name=value["name"],
        save=tuple(map(parse_selector, value["save"])),
        recompute=tuple(map(parse_selector, value["recompute"])),
        otherwise=value["otherwise"],
        prefer=value["prefer"],
        source=value["source"],
    )


def _spec(
    name: str | None, save: Any, recompute: Any, otherwise: str | None, prefer: bool, source: str
) -> RegionSpec:
    where = f" at {source}" if source else ""
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f"ac_region{where}: the name is {name!r}, and must be text; for a decorator write "
            "@ac_region() with parentheses"
        )
    if otherwise is not None and otherwise not in _OTHERWISE:
        raise ConfigError(
            f'ac_region{where}: otherwise={otherwise!r}; allowed are "recompute", "save", "auto", '
            "and None for the default"
        )
    if not isinstance(prefer, bool):
        raise ConfigError(f"ac_region{where}: prefer={prefer!r}; allowed are True and False")
    try:
        saved, recomputed = parse_selectors(save), parse_selectors(recompute)
    except ConfigError as error:
        raise ConfigError(f"ac_region{where}: {error}") from error
    if clash := conflicts(saved, recomputed):
        raise HintError(
            f"ac_region{where} contradicts itself: {'; '.join(clash)}. Remove it from one of them"
        )
    if otherwise is None:
        otherwise = "auto" if recomputed and not saved else "recompute"
    return RegionSpec(name or "", saved, recomputed, otherwise, prefer, source)


@private.constant_while_tracing
def _is_capturing() -> bool:
    return _numbers() is not None


def _numbers() -> Entries | None:
    """Of the trace that is under way, where what it makes reads hints."""
    if (numbers := _uids.get()) is not None:
        return numbers
    backend = private.compiling_backend()
    if not isinstance(backend, ReadsHints):
        return None
    if private.root_function() in _OWN_FRAMES:
        warnings.warn(
            f"the hints at {private.running_line()} are not read: Dynamo left the function around them "
            "to eager, as where a graph break splits a region. Move what breaks the graph into "
            "another function, or out of the model; TORCH_LOGS=graph_breaks tells what it is",
            UserWarning,
            stacklevel=2,
        )
        return None
    return backend.entries


@private.constant_while_tracing
def _enter(
    name: str | None,
    save: Any,
    recompute: Any,
    otherwise: str | None,
    prefer: bool,
    source: str | None,
) -> dict[str, Any]:
    """Runs at trace time, once per entry: the annotation to write, under a key of its own."""
    if source is None:
        line = private.traced_line()
        source = f"{line[0]}:{line[1]}" if line else ""
    spec = _spec(name, save, recompute, otherwise, prefer, source)
    uids = _numbers()
    assert uids is not None, "regions are entered while something reads them"
    return {f"{REGION_PREFIX}{uids.enter(spec)}": spec.annotation()}


def ac_region(
    name: str | None = None,
    *,
    save: Any = (),
    recompute: Any = (),
    otherwise: str | None = None,
    prefer: bool = False,
) -> Any:
    """A region of the model with hints of its own: ``with ac_region(...):`` or ``@ac_region(...)``.

    What enters the region is kept. Dynamo does not enter an object that was made outside of what it
    traces: one that `__init__` made is called where it is entered, ``with self.region():``. In plain
    eager the context manager does nothing, and the
    decorator is selective activation checkpointing by `torch.utils.checkpoint`.

    Args:
        name: for reports.
        save: selectors of values that are kept; one, or several: an operator, a group, a name that
            `checkpoint_name` gave, or `every`. A name goes before `every`, and that before an operator.
        recompute: selectors of values that are recomputed in backward.
        otherwise: what happens to the rest: ``"recompute"`` (the default where `save` or nothing
            is given), ``"save"``, or ``"auto"`` (the default where only `recompute` is given).
        prefer: a preference, which the automatic part may go against where its limit demands it.

    Raises:
        ConfigError: an unknown operator, or `otherwise` is not one of the above.
        HintError: an operator is both saved and recomputed.
    """
    if torch.compiler.is_dynamo_compiling():
        if _is_capturing():
            save, recompute = _constant(save), _constant(recompute)
            return private.annotate(_enter(name, save, recompute, otherwise, prefer, None))
        return contextlib.nullcontext()
    frame = sys._getframe(1)
    source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return _Region(_spec(name, save, recompute, otherwise, prefer, source))


def _constant(selectors: Any) -> Any:
    """Selectors in text, because Dynamo takes no object of ours for a constant; it traces this."""
    if isinstance(selectors, Selector):
        return f"{selectors.text}/{selectors.every}"
    if isinstance(selectors, (list, tuple)):
        return [_constant(x) for x in selectors]
    return selectors


class _Region:
    """What `ac_region` gives outside of tracing: a manager that does nothing, and a decorator."""

    def __init__(self, spec: RegionSpec) -> None:
        self.spec = spec
        # text, because Dynamo takes no selector for a constant
        self.save = tuple(map(str, spec.save))
        self.recompute = tuple(map(str, spec.recompute))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __call__(self, fn: Any = None) -> Any:
        """Decorate `fn`; without it, the region anew, to be entered where Dynamo traces."""
        if fn is None:
            return self._anew()
        return self._decorated(fn)

    def _anew(self) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self
        spec = self.spec
        if not _is_capturing():
            return contextlib.nullcontext()
        marks = _enter(spec.name, self.save, self.recompute, spec.otherwise, spec.prefer, None)
        return private.annotate(marks)

    def _decorated(self, fn: F) -> F:
        if not callable(fn) or isinstance(fn, (type, torch.nn.Module)):
            raise HintError(
                f"{self.spec.label} at {self.spec.source} decorates {fn!r}: decorate a function or "
                "a method such as forward"
            )
        spec = self.spec
        name, otherwise, prefer, source = spec.name, spec.otherwise, spec.prefer, spec.source
        save, recompute = self.save, self.recompute
        checkpointed = _eager(fn, spec)

        @functools.wraps(fn)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                if _is_capturing():
                    marks = _enter(name, save, recompute, otherwise, prefer, source)
                    with private.annotate(marks):
                        return fn(*args, **kwargs)
                return fn(*args, **kwargs)
            return checkpointed(*args, **kwargs)

        return in_region  # type: ignore[return-value]


@private.constant_while_tracing
def _checked_name(name: Any) -> str:
    return check_name(name)


def checkpoint_name(x: T, name: str) -> T:
    """Give a value a name that hints select by: ``ac_region(save=["query"])``, ``"::query=save"``.

    `x` comes back itself, in eager and under plain `torch.compile`. While autop_ac captures a model the
    name is left on the value and nothing is added to the graph. Several values may have one name, a
    value several names. A view holds no memory: its name is one of what it views.

    Args:
        x: a tensor.
        name: a word; no group (``"MATMUL"``) and no higher-order operator. A word is always a name,
            and an operator always has a dot: ``"mm"`` is no ``"aten.mm"``.

    Raises:
        ConfigError: not a tensor, or not such a word.
    """
    if not isinstance(x, torch.Tensor):
        raise ConfigError(
            f"checkpoint_name(..., {name!r}) got a {type(x).__name__}: name each tensor by itself"
        )
    if not torch.compiler.is_dynamo_compiling():
        check_name(name)
    elif _is_capturing():
        private.mark(x, _checked_name(name))
    return x


@private.constant_while_tracing
def _placed_at(placements: Any) -> tuple[str, str]:
    """Runs at trace time: the placements in text, and the line."""
    line = private.traced_line()
    return _checked_placements(placements), f"{line[0]}:{line[1]}" if line else ""


def _checked_placements(placements: Any) -> str:
    given = (placements,) if isinstance(placements, Placement) else placements
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(
            f"with_sharding_constraint got {placements!r}: give a tuple, one placement per mesh axis, "
            "such as (Shard(0), Replicate())"
        )
    if any(type(p) is not Shard and type(p) is not Replicate for p in given):
        raise ConfigError(
            f"with_sharding_constraint got {placements!r}: allowed are Shard(dim) and Replicate()"
        )
    return placement_text(given)


def with_sharding_constraint(x: T, placements: Any) -> T:
    """Fix how a value lies on the mesh, and its gradient with it; the value comes back.

    While autop_ac captures a model, the search places the value so here, moved there from wherever it
    was computed; nothing is left of it in what runs. In eager and under plain `torch.compile` it does
    nothing.

    Args:
        x: a tensor.
        placements: `Shard` or `Replicate`, one per mesh axis.

    Raises:
        ConfigError: not a tensor, or no such placements; when the plan is made, placements that the mesh or
            the tensor's shape does not allow.
    """
    if not isinstance(x, torch.Tensor):
        raise ConfigError(
            f"with_sharding_constraint got a {type(x).__name__}: constrain each tensor by itself"
        )
    if not torch.compiler.is_dynamo_compiling():
        _checked_placements(placements)
    elif _is_capturing():
        text, source = _placed_at(placements)
        return private.placed(x, text, source)
    return x


def region_numbers(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the entries that the ``meta`` of a node is in."""
    keys = meta.get("custom") or {}
    return tuple(int(k.removeprefix(REGION_PREFIX)) for k in keys if k.startswith(REGION_PREFIX))


def is_region_object(dynamo_message: str) -> bool:
    """Whether Dynamo gave up on entering an `ac_region` that was made outside of what it traces."""
    return "context manager" in dynamo_message and f"({_Region.__name__})" in dynamo_message


def _eager(fn: F, spec: RegionSpec) -> Callable[..., Any]:
    """`fn` under activation checkpointing of eager PyTorch, or `fn` itself where all is kept."""
    if spec.otherwise != "recompute" and not spec.recompute:
        return fn
    if spec.otherwise == "recompute" and not spec.save:
        return partial(checkpoint, fn, use_reentrant=False)
    policy = partial(_eager_policy, spec)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def _eager_policy(
    spec: RegionSpec, _ctx: Any, op: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    text = str(op)
    # eager checkpoints see operators one by one: names are unknown to them, `every` is all
    if any(s.matches(text) for s in spec.save):
        return CheckpointPolicy.PREFER_SAVE if spec.prefer else CheckpointPolicy.MUST_SAVE
    if any(s.matches(text) for s in spec.recompute):
        return CheckpointPolicy.PREFER_RECOMPUTE if spec.prefer else CheckpointPolicy.MUST_RECOMPUTE
    if spec.otherwise == "recompute":
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_SAVE
