"""Who holds memory at every step of forward and backward, and how long the steps take.

Both read the same two running orders as `liveness`: what is predicted here sums, step by step, to
``Profile.forward`` and ``Profile.backward``.

Time is that of two queues, as a GPU has them: one computes, one communicates. A collective starts when
its turn comes in the running order, and whoever reads it waits for its end; that wait is *exposed*.
Weaknesses: a collective never starts earlier than its place in the order, whatever a compiler moves
later; no contention between the two queues. Linear in nodes and storages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .facts import Facts, Value
from .liveness import Run, backward_order, forward_order, input_storages

Phase = Literal["forward", "recompute", "backward"]

HOLDERS = (
    "parameters", "optimizer state", "inputs", "gathered weights", "saved activations", "outputs",
    "recomputed", "gradients", "temporaries",
)  # fmt: skip
"""Who may hold bytes, in the order in which reports stack them."""


@dataclass(frozen=True, slots=True)
class Span:
    """One storage from the step that makes it to the last that needs it, both counted.

    Attributes:
        holder: one of `HOLDERS`.
        value: index of the value that allocates it.
        bytes: on one device.
        first, last: steps of the `Timeline`.
    """

    holder: str
    value: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Forward, then backward, step by step.

    Attributes:
        steps: indices of the values computed, in running order.
        forward_steps: how many of them belong to forward.
        spans: storages that come and go.
        always: bytes alive throughout, by holder: parameters, optimizer state, inputs.
    """

    steps: tuple[int, ...]
    forward_steps: int
    spans: tuple[Span, ...]
    always: Mapping[str, int]

    def by_holder(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes at every step for each of `HOLDERS` that holds any at some step."""
        count = len(self.steps)
        change = {holder: [0] * (count + 1) for holder in HOLDERS}
        for span in self.spans:
            change[span.holder][span.first] += span.bytes
            change[span.holder][span.last + 1] -= span.bytes
        found = {}
        for holder in HOLDERS:
            alive, total = [], self.always.get(holder, 0)
            for delta in change[holder][:count]:
                total += delta
                alive.append(total)
            if any(alive):
                found[holder] = tuple(alive)
        return found

    @property
    def live(self) -> tuple[int, ...]:
        """Bytes alive at every step."""
        return tuple(map(sum, zip(*self.by_holder().values(), strict=True)))

    @property
    def peak_step(self) -> int:
        """The first step at which most bytes are alive, -1 where nothing is computed."""
        live = self.live
        return live.index(max(live)) if live else -1

    def at(self, step: int) -> tuple[Span, ...]:
        """The storages alive at a step, those alive throughout not among them."""
        return tuple(s for s in self.spans if s.first <= step <= s.last)


def timeline(
    facts: Facts,
    saved: Sequence[int],
    gathered: Collection[int] = (),
    optimizer_bytes: int | None = None,
) -> Timeline:
    """Predict who holds memory when `saved` is kept from forward to backward.

    Args:
        gathered: values that are a parameter on its way from its shards to where it is used.
        optimizer_bytes: of optimizer state; None for what ``facts.parameter_bytes`` has beyond the
            parameters and buffers themselves.
    """
    values = facts.values
    always = input_storages(facts)
    held = dict.fromkeys(("parameters", "inputs"), 0)
    for storage, holder in always.items():
        held[holder] += facts.storage_bytes[storage]
    if optimizer_bytes is None:
        optimizer_bytes = max(0, facts.parameter_bytes - held["parameters"])
    ahead, back = forward_order(facts, saved), backward_order(facts, saved)
    tangents = tuple(v.index for v in values if v.role == "tangent")
    forward = Run(facts, always, (), ahead, (*facts.forward_outputs, *saved))
    backward = Run(facts, always, (*saved, *tangents), back, facts.backward_outputs)
    kept = _storages(values, saved)
    gathers = _storages(values, gathered)
    outputs = _storages(values, facts.forward_outputs)
    gradients = _storages(values, facts.backward_outputs)
    again = _storages(values, [i for i in back if values[i].side == "forward"])
    maker: dict[int, int] = {}
    for value in values:
        for s in value.storages:
            maker.setdefault(s, value.index)

    def holder_in_forward(s: int) -> str:
        if s in gathers:
            return "gathered weights"
        if s in kept:
            return "saved activations"
        return "outputs" if s in outputs else "temporaries"

    def holder_in_backward(s: int) -> str:
        if s in gathers:
            return "gathered weights"
        if s in kept:
            return "saved activations"
        if s in gradients:
            return "gradients"
        return "recomputed" if s in again else "temporaries"

    spans = []
    for run, start, holder_of in (
        (forward, 0, holder_in_forward),
        (backward, len(ahead), holder_in_backward),
    ):
        end = len(run.alive)
        for s, born in run.birth.items():
            if end and facts.storage_bytes[s]:
                last = start + min(run.death[s], end - 1)
                spans.append(
                    Span(holder_of(s), maker[s], facts.storage_bytes[s], start + born, last)
                )
    return Timeline(
        (*ahead, *back), len(ahead), tuple(spans), {**held, "optimizer state": optimizer_bytes}
    )


def _storages(values: Sequence[Value], indices: Collection[int]) -> set[int]:
    return {s for i in indices for s in values[i].storages}


def phase_of(facts: Facts, made: Timeline, step: int) -> Phase:
    """Which part of the training step a step of the timeline belongs to."""
    if step < made.forward_steps:
        return "forward"
    return "recompute" if facts.values[made.steps[step]].side == "forward" else "backward"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one forward and backward.

    Attributes:
        compute_s: of the operators of forward and backward, each once.
        recompute_s: of all that backward runs again, operators and collectives.
        communication_s: of all collectives, those run again included.
        exposed_s: of `communication_s`, what computation waits for.
        recompute_communication_s: of `recompute_s` the collectives; they are in `communication_s` too.
    """

    compute_s: float
    recompute_s: float
    communication_s: float
    exposed_s: float
    recompute_communication_s: float = 0.0

    @property
    def recompute_operators_s(self) -> float:
        """Of `recompute_s` what is no collective."""
        return self.recompute_s - self.recompute_communication_s

    @property
    def step_s(self) -> float:
        """Seconds of the whole step: computation, operators run again, and waiting for collectives."""
        return self.compute_s + self.recompute_operators_s + self.exposed_s


def step_time(facts: Facts, saved: Sequence[int]) -> StepTime:
    """Predict where the seconds of one step go when `saved` is kept."""
    ahead = forward_order(facts, saved)
    now = network_free = exposed = 0.0
    compute = recompute = communication = moved_again = 0.0
    done: dict[int, float] = {}  # when a collective ends

    def wait(until: float) -> None:
        nonlocal now, exposed
        exposed += max(0.0, until - now)
        now = max(now, until)

    for at, i in enumerate((*ahead, *backward_order(facts, saved))):
        value = facts.values[i]
        again = at >= len(ahead) and value.side == "forward"
        recompute += value.time_s if again else 0.0
        for source in value.inputs:
            if source in done:
                wait(done[source])
        if value.collective:
            network_free = max(now, network_free) + value.time_s
            done[i] = network_free
            communication += value.time_s
            moved_again += value.time_s if again else 0.0
            continue
        now += value.time_s
        compute += 0.0 if again else value.time_s
    wait(network_free)
    # the same seconds summed in another order may come out a bit larger
    exposed = min(exposed, communication)
    return StepTime(compute, recompute, communication, exposed, moved_again)
