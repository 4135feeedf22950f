"""Which values each of the two graphs computes, in which order, and the bytes alive at every step.

The orders given here are those that `lowering/partition.py` builds, so what is predicted is what runs:
forward keeps graph order; backward keeps the graph order of autograd's nodes, and before each of them
computes what it needs of forward values that were not kept, in graph order and no earlier. Recomputing
as late as possible is what makes checkpointing save memory: with everything recomputed at the start of
backward, the peak is the one without checkpointing. Where the user wants gathers to be prefetched,
`graph/ahead.py` moves them in both orders.

A graph runs node by node, as `torch.fx.Interpreter` does when its inputs are boxed: a value is dropped
right after its last reader, what a collective reads after its wait; one that nobody reads lives to the end. A storage is alive while any value
in it is. Scratch memory inside one operator is not seen. Linear in nodes and edges, but for sorting the
ancestors recomputed together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .ahead import issue_ahead, wait_late
from .facts import Facts, Side, Value


@dataclass(frozen=True, slots=True)
class Profile:
    """Predicted memory of one forward and one backward on one device, in bytes.

    Attributes:
        forward: bytes alive while each step of `forward_order` runs, its results included.
        backward: the same for `backward_order`.
        peak_bytes: the largest of both.
        kept_bytes: bytes of the storages kept from forward to backward beyond the graph inputs.
        holders: bytes at the peak by what holds them: "parameters", "inputs", "saved", "outputs",
            "recomputed", "gradients", "temporaries"; they sum to `peak_bytes`.
        peak_index: index of the value being computed at the peak, -1 where nothing is computed.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    peak_bytes: int
    kept_bytes: int
    holders: Mapping[str, int]
    peak_index: int = -1


def must_run(value: Value) -> bool:
    """Runs on its own side even where nobody reads it: effects, and draws of random numbers."""
    return value.effectful or value.random


def forward_order(facts: Facts, saved: Sequence[int]) -> tuple[int, ...]:
    """Forward values that the forward graph computes, in graph order but for gathers issued ahead."""
    order = _with_waits(facts, _computed(facts, "forward", (*facts.forward_outputs, *saved)))
    if facts.prefetch_bytes is None:
        return order
    return issue_ahead(facts, order, facts.prefetch_bytes)


def live_backward(facts: Facts) -> tuple[int, ...]:
    """Backward values that a gradient needs or that must run, in graph order."""
    return _computed(facts, "backward", facts.backward_outputs)


def _computed(facts: Facts, side: Side, wanted: Iterable[int]) -> tuple[int, ...]:
    """Values of one side that `wanted` needs or that must run, in graph order."""
    needed = set(wanted)
    needed.update(v.index for v in facts.values if v.side == side and must_run(v))
    order = []
    for value in reversed(facts.values):
        if value.index in needed and value.side == side:
            order.append(value.index)
            needed.update(value.inputs)
    return tuple(reversed(order))


def backward_order(facts: Facts, saved: Sequence[int]) -> tuple[int, ...]:
    """Values that the backward graph computes, recomputed and backward ones, in running order.

    Args:
        saved: indices of the forward values that backward is given; it is given all graph inputs.
    """
    have = set(saved)
    have.update(v.index for v in facts.values if v.side == "input")
    brought: list[int] = []

    def bring(wanted: Iterable[int]) -> None:
        missing: set[int] = set()
        stack = list(wanted)
        while stack:
            i = stack.pop()
            if i not in have and i not in missing:
                missing.add(i)
                stack.extend(facts.values[i].inputs)
        brought.extend(sorted(missing))
        have.update(missing)

    for i in live_backward(facts):
        bring(facts.values[i].inputs)
        brought.append(i)
        have.add(i)
    bring(facts.backward_outputs)
    order = _with_waits(facts, brought)
    if facts.prefetch_bytes is None:
        return order
    return wait_late(facts, issue_ahead(facts, order, facts.prefetch_bytes))


def _with_waits(facts: Facts, order: Sequence[int]) -> tuple[int, ...]:
    """`order` with a wait for each tensor of a collective of several, wanted or not.

    PyTorch holds what a collective gives until it is waited for. Waits that nobody else brings stand
    behind the first of the same collective.
    """
    values, there = facts.values, set(order)
    several = {i for i in order if values[i].collective.endswith("coalesced")}
    if not several:
        return tuple(order)
    unwanted: dict[int, list[int]] = {}
    source: dict[int, int] = {}  # of a part and of its wait
    for value in values:
        start = source.get(value.inputs[0]) if len(value.inputs) == 1 else None
        if value.op == "getitem" and value.inputs[0] in several:
            source[value.index] = value.inputs[0]
        elif start is not None and value.op.endswith("wait_tensor.default"):
            (part,) = value.inputs
            source[value.index] = start
            if value.index not in there:
                unwanted.setdefault(start, []).extend((*({part} - there), value.index))
    made: list[int] = []
    for i in order:
        made.append(i)
        if i in source and values[i].op != "getitem":
            made.extend(unwanted.pop(source[i], ()))
    return tuple(made)


def profile(facts: Facts, saved: Sequence[int]) -> Profile:
    """Predict the bytes alive at every step when `saved` is kept from forward to backward.

    Parameters, buffers and user inputs are alive throughout. User outputs are alive through forward;
    the loss is taken to be done with them when backward starts. Gradients live to the end.
    """
    always = input_storages(facts)
    steps = forward_order(facts, saved)
    ahead = Run(facts, always, (), steps, (*facts.forward_outputs, *saved))
    steps_back = backward_order(facts, saved)
    tangents = tuple(v.index for v in facts.values if v.role == "tangent")
    back = Run(facts, always, (*saved, *tangents), steps_back, facts.backward_outputs)
    base = _base(facts, always)
    forward = tuple(base + b for b in ahead.alive)
    backward = tuple(base + b for b in back.alive)
    kept = {s for i in saved for s in facts.values[i].storages} - always.keys()
    peak = max((*forward, *backward), default=base)
    holders = {"parameters": base - _always_bytes(facts, always, "inputs")}
    holders["inputs"] = base - holders["parameters"]
    peak_index = -1
    if peak in forward:
        at = forward.index(peak)
        peak_index = steps[at]
        holders |= ahead.holders_at(at, kept, (), "outputs")
    elif backward:
        at = backward.index(peak)
        peak_index = steps_back[at]
        again = [i for i in steps_back if facts.values[i].side == "forward"]
        holders |= back.holders_at(at, kept, again, "gradients")
    return Profile(
        forward=forward,
        backward=backward,
        peak_bytes=peak,
        kept_bytes=sum(facts.storage_bytes[s] for s in kept),
        holders=MappingProxyType(holders),
        peak_index=peak_index,
    )


def input_storages(facts: Facts) -> dict[int, str]:
    """Storages that are alive throughout, by who holds them."""
    found: dict[int, str] = {}
    for value in facts.values:
        if value.side == "input" and value.role != "tangent":
            for s in value.storages:
                found.setdefault(s, "inputs" if value.role == "input" else "parameters")
    return found


def _always_bytes(facts: Facts, always: Mapping[int, str], holder: str) -> int:
    """Bytes of the storages alive throughout that `holder` holds."""
    return sum(facts.storage_bytes[s] for s, h in always.items() if h == holder)


def _base(facts: Facts, always: Mapping[int, str]) -> int:
    # hand-made facts may give parameter_bytes without placeholders that hold them
    parameters = max(facts.parameter_bytes, _always_bytes(facts, always, "parameters"))
    return parameters + _always_bytes(facts, always, "inputs")


class Run:
    """One graph run node by node: bytes alive beyond `always`, and each storage's span of steps."""

    def __init__(
        self,
        facts: Facts,
        always: Collection[int],
        given: Sequence[int],
        steps: Sequence[int],
        results: Sequence[int],
    ) -> None:
        self.facts = facts
        self.results = results
        end = len(steps)
        last: dict[int, int] = {}
        for at, i in enumerate(steps):
            for source in (*facts.values[i].inputs, *facts.values[i].holds):
                last[source] = at
        last.update(dict.fromkeys(results, end))
        self.birth: dict[int, int] = {}
        self.death: dict[int, int] = {}
        for born, i in (*((0, i) for i in given), *enumerate(steps)):
            for s in facts.values[i].storages:
                if s not in always:
                    self.birth.setdefault(s, born)
                    self.death[s] = max(self.death.get(s, 0), last.get(i, end))
        change = [0] * (end + 2)
        for s, born in self.birth.items():
            change[born] += facts.storage_bytes[s]
            change[min(self.death[s], end) + 1] -= facts.storage_bytes[s]
        self.alive: list[int] = []
        total = 0
        for at in range(end):
            total += change[at]
            self.alive.append(total)

    def holders_at(
        self, at: int, kept: Collection[int], recomputed: Iterable[int], results: str
    ) -> dict[str, int]:
        values = self.facts.values
        outputs = {s for i in self.results for s in values[i].storages}
        again = {s for i in recomputed for s in values[i].storages}
        holders = dict.fromkeys(("saved", "outputs", "recomputed", "gradients", "temporaries"), 0)
        for s, born in self.birth.items():
            if not born <= at <= self.death[s]:
                continue
            if s in kept:
                holder = "saved"
            elif s in outputs:
                holder = results
            elif s in again:
                holder = "recomputed"
            else:
                holder = "temporaries"
            holders[holder] += self.facts.storage_bytes[s]
        return holders
