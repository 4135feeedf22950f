"""Why a value is kept or computed again: a question about a module, a tensor or a parameter, answered.

JAX's ``print_saved_residuals`` lists what crosses from forward to backward; here each value has its
decision too: who took it, why, what it set aside, and what it costs in bytes or in seconds.
"""

from __future__ import annotations

import difflib
import html
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import ConfigError, UsageError
from ..folding import fold_paths, unnumbered
from ..graph.facts import Facts, Value
from ..graph.liveness import backward_order
from ..policies import module_matches
from ..recompute.collectives import parameter_chains
from ..recompute.hints import root_of
from ..recompute.plan import Decision, Wish
from ..recompute.verify import must_be_saved
from .basis import Basis
from .text import duration, size, wrapped

Fate = Literal["saved", "recomputed", "unread"]


@dataclass(frozen=True, slots=True)
class Explained:
    """What becomes of one forward value, and why; reports and answers are made of these.

    Attributes:
        name, op: of the local graph's node; op is the user's operator where sharding rewrote it.
        module, source: the user's module path, file and line.
        shape, dtype: on one device.  bytes: of the storages it holds there.
        fate: "saved" from forward to backward, "recomputed" in backward, or "unread" by it.
        origin, reason: who decided ("hint", "rule", "auto", ...) and why, in plain words.
        set_aside: hints and rules that wanted something else, in plain words.
        time_s: seconds to compute it once: what recomputing it costs.
    """

    name: str
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    fate: Fate
    origin: str
    reason: str
    set_aside: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """An answer of `explain`; `str` gives it as text, ``_repr_html_`` to a notebook.

    Attributes:
        asked: the question.
        about: what it was taken for: "module", "value", "name" (of `checkpoint_name`) or "parameter".
        placements: of a parameter, its placement along each mesh axis.
        values: the forward values that it is about, in order of execution. Views are left out where a
            module was asked for: they hold no memory and follow what they view.
        saved_bytes: of storages kept, each counted once.  recomputed_bytes, recompute_s: of what
            backward computes again.
    """

    asked: str
    about: str
    placements: str
    values: tuple[Explained, ...]
    saved_bytes: int
    recomputed_bytes: int
    recompute_s: float

    @property
    def saved(self) -> tuple[Explained, ...]:
        """Those kept from forward to backward."""
        return tuple(v for v in self.values if v.fate == "saved")

    @property
    def recomputed(self) -> tuple[Explained, ...]:
        """Those computed again in backward."""
        return tuple(v for v in self.values if v.fate == "recomputed")

    def to_dict(self) -> dict[str, Any]:
        """The answer in plain values that JSON can hold."""
        plain = asdict(self)
        for value in plain["values"]:
            value |= {"shape": list(value["shape"]), "set_aside": list(value["set_aside"])}
        return {**plain, "values": list(plain["values"])}

    def __str__(self) -> str:
        lines = [f"{self.asked or '(root)'} ({self.about}{self.placements})"]
        unread = [v for v in self.values if v.fate == "unread"]
        totals = (
            ("saved", self.saved, f", {size(self.saved_bytes)}"),
            (
                "recomputed",
                self.recomputed,
                f", {size(self.recomputed_bytes)}, {duration(self.recompute_s)} a step",
            ),
            ("not read by backward", unread, ""),
        )
        for heading, values, total in totals:
            if values:
                count = f"{len(values)} value{'s' if len(values) > 1 else ''}"
                lines.append(f"{heading}: {count}{total}")
                if values[0].fate != "unread" or self.about != "module":
                    lines += _folded(values)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(basis: Basis, asked: str) -> Explanation:
    """Answer what is saved and recomputed of a module, a tensor or a parameter, and why.

    Args:
        asked: a module path or a glob of some (``"layers.3.attention"``, ``"layers.*.mlp"``, ``""`` for the
            whole model), a tensor's name in the graph, a name that `checkpoint_name` gave, or a
            parameter's name.

    Raises:
        UsageError: nothing is called so; the nearest names are told.
    """
    about, indices = _meant(basis, asked)
    facts, saved, again = basis.facts, frozenset(basis.plan.saved), run_again(basis)
    if about == "module":  # items of a tuple that are kept stand for it
        indices = [i for i in indices if i in saved or facts.values[i].follows is None]
    elif about != "parameter":  # what a view views holds the bytes, and is what is kept
        roots = {root_of(facts, i) for i in indices if i not in saved}
        indices = sorted({*indices, *(r for r in roots if r in saved or r in again)})
    values = explained(basis, indices, again)
    kept = {s for i in indices if i in saved for s in facts.values[i].storages}
    rerun = [facts.values[i] for i in indices if i in again]
    return Explanation(
        asked,
        about,
        _placements(basis, asked) if about == "parameter" else "",
        values,
        sum(facts.storage_bytes[s] for s in kept),
        sum(v.bytes for v in rerun),
        sum(v.time_s for v in rerun),
    )


def run_again(basis: Basis) -> frozenset[int]:
    """The forward values that backward computes again."""
    order = backward_order(basis.facts, basis.plan.saved)
    return frozenset(i for i in order if basis.facts.values[i].side == "forward")


def explained(
    basis: Basis, indices: Iterable[int], again: Collection[int]
) -> tuple[Explained, ...]:
    """What becomes of forward values.

    Args:
        indices: of the values.
        again: of those that backward computes again, see `run_again`.
    """
    saved = frozenset(basis.plan.saved)
    return tuple(_explained(basis, i, saved, again) for i in indices)


def _meant(basis: Basis, asked: str) -> tuple[str, list[int]]:
    """What the question is about, and the forward values that answer it."""
    facts = basis.facts
    parameters = {v.parameter: v for v in facts.values if v.role in ("parameter", "buffer")}
    if asked in parameters:
        return "parameter", _chain(facts, parameters[asked])
    named = set(basis.names.get(asked, ()))
    if named:
        return "name", [v.index for v in facts.forward if v.origin in named]
    exact = [v.index for v in facts.forward if asked and asked in (v.name, v.origin)]
    if exact:
        return "value", exact
    try:
        inside = [v.index for v in facts.forward if module_matches(asked, v.module)]
    except ConfigError:  # no glob of a path either
        inside = []
    if inside:
        return "module", inside
    other = [v for v in facts.values if v.name == asked and v.side != "forward"]
    if other:
        raise UsageError(
            f"explain({asked!r}): a value of the {other[0].side} side, which is neither saved nor "
            "recomputed; ask for one of forward"
        )
    raise UsageError(
        f"explain({asked!r}): no module, tensor or parameter is called so{_nearest(basis, asked)}"
    )


def _nearest(basis: Basis, asked: str) -> str:
    modules = {".".join(parts[: i + 1]) for v in basis.facts.forward
               for parts in [v.module.split(".")] for i in range(len(parts))}  # fmt: skip
    known = {*modules, *basis.names, *(v.name for v in basis.facts.forward)}
    known |= {v.parameter for v in basis.facts.values if v.role in ("parameter", "buffer")}
    near = difflib.get_close_matches(asked, sorted(known - {""}), n=3)
    return f"; nearest are {', '.join(near)}" if near else ""


def _chain(facts: Facts, parameter: Value) -> list[int]:
    """The values between a parameter's shards and where it is used."""
    chains = parameter_chains(facts)
    reached = {parameter.index}
    for value in facts.forward:
        if value.index in chains and not reached.isdisjoint(value.inputs):
            reached.add(value.index)
    return sorted(reached - {parameter.index})


def _placements(basis: Basis, parameter: str) -> str:
    held = next(v for v in basis.facts.values if v.parameter == parameter and v.side == "input")
    local = f", {held.dtype}{list(held.shape)} on one device"
    if basis.sharding is None or parameter not in basis.sharding.parameters:
        return local
    axes = zip(basis.sharding.axis_names, basis.sharding.parameters[parameter], strict=True)
    return f"{local}, placed {', '.join(f'{axis}: {placed}' for axis, placed in axes)}"


def _explained(
    basis: Basis, index: int, saved: Collection[int], again: Collection[int]
) -> Explained:
    value = basis.facts.values[index]
    decision = basis.plan.decisions[index]
    fate: Fate = "saved" if index in saved else "recomputed" if index in again else "unread"
    origin, reason = _why(basis, value, decision, fate)
    return Explained(
        value.name,
        value.captured_op or value.op,
        value.module,
        value.source,
        value.shape,
        value.dtype,
        sum(basis.facts.storage_bytes[s] for s in value.storages),
        fate,
        origin,
        reason,
        tuple(map(_wish, decision.overridden)),
        value.time_s,
    )


def _why(basis: Basis, value: Value, decision: Decision, fate: Fate) -> tuple[str, str]:
    origin = decision.origin.name.lower()
    if fate == "unread":
        return "default", "backward does not read it"
    wanted = "saved" if decision.action == "save" else "recomputed"
    if wanted == fate:
        return origin, decision.reason
    if fate == "saved" and must_be_saved(basis.facts, value.index):
        return "correctness", "computing it again would repeat an effect or read a changed input"
    root = basis.facts.values[root_of(basis.facts, value.index)]
    if root.index == value.index:
        return origin, decision.reason
    return "default", f"a view, made again for nothing from {root.name}, which is kept"


def _wish(wish: Wish) -> str:
    where = f" ({wish.source})" if wish.source else ""
    return f"{wish.origin.name.lower()} asks to {wish.action}: {wish.reason}{where}"


def _folded(values: Sequence[Explained]) -> list[str]:
    keys = [
        (v.module, (v.op, v.shape, v.dtype, v.source, v.origin, unnumbered(v.reason), v.set_aside))
        for v in values
    ]
    lines = []
    for path, members in fold_paths(keys):
        first = values[members[0]]
        many = f"{len(members)} x " if len(members) > 1 else ""
        shape = f"{first.dtype}[{', '.join(map(str, first.shape))}]"
        cost = f", {duration(first.time_s)}" if first.fate == "recomputed" else ""
        lines.append(
            wrapped(
                f"  {many}{first.name}: {first.op} {shape}, {size(first.bytes)}{cost}, "
                f"{path or '(root)'}{f', {first.source}' if first.source else ''}"
            )
        )
        told: Iterable[str] = (
            f"{first.origin}: {first.reason if len(members) == 1 else unnumbered(first.reason)}",
            *(f"set aside: {a}" for a in first.set_aside),
        )
        lines += [wrapped(f"      {line}") for line in told]
    return lines
