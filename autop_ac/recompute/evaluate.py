"""Peak and recompute time of one save set, fast enough to compare thousands of them.

For a mask over the values that are free to be saved, `Evaluator` gives what
``profile(facts, closure(facts, actions)[0]).peak_bytes`` and the sum of ``time_s`` over the forward
values of ``backward_order(facts, saved)`` give, which the tests hold it to. It does not build those
orders. Let T(v) be the backward step before which the forward value v is computed again. Backward
computes as late as it can, so that

    T(v) = min(first backward step that reads v, T(c) over the readers c of v that are recomputed),

and v is needed exactly where T(v) is finite: it is kept if its decision says so, else recomputed. One
pass over the forward values from last to first gives the saved set, all T and, of each storage, the
first and the last step at which it is held; steps are pairs (T, position in graph order). A cumulative
sum over the sorted ends gives the peak. Linear but for that sort; the backward values' own part is
worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..graph.facts import Facts
from ..graph.liveness import live_backward, must_run
from .plan import Action
from .verify import effective_action, keepable, must_be_saved

_NEVER, _ALWAYS = -2, -1  # indices into a mask that ends in (False, True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one mask leads to.

    Attributes:
        peak_bytes: predicted peak over forward and backward.
        time_s: seconds of what backward computes again.
        saved: the forward values kept, ascending.
    """

    peak_bytes: int
    time_s: float
    saved: tuple[int, ...]


class Evaluator:
    """Outcomes of masks over `free` roots under `fixed` actions, each worked out once.

    Args:
        facts: the local graph.
        fixed: actions of roots that are decided; a root in neither place is saved, as in `closure`.
        free: roots to choose for; ``mask[k]`` says whether ``free[k]`` is saved.
    """

    def __init__(self, facts: Facts, fixed: Mapping[int, Action], free: Collection[int]) -> None:
        self.facts = facts
        self.free = tuple(sorted(free))
        self._known: dict[bytes, Outcome] = {}
        self._earliest: list[int] | None = None
        values = facts.values
        slot_of = {root: k for k, root in enumerate(self.free)}
        producers = {v.follows for v in values if v.op == "getitem"}
        self.slot: list[int] = []
        self.parents: list[tuple[int, ...]] = []
        for v in values:
            slot = _NEVER
            if v.side == "forward":
                slot = _slot(facts, fixed, slot_of, v.index)
                if v.is_tensor or v.op == "get_attr":
                    slot = slot if keepable(facts, v.index, producers) else _NEVER
                else:
                    slot = _ALWAYS
            self.slot.append(slot)
            reads = (*v.inputs, *v.holds)  # a wait comes after what it holds is needed anyway
            self.parents.append(tuple(i for i in reads if values[i].side == "forward"))
        self._backward()
        self._forward()

    def _backward(self) -> None:
        facts, values = self.facts, self.facts.values
        live = live_backward(facts)
        n = len(values)
        self.end = len(live)
        self.stride = n + 1
        far = (self.end + 2) * self.stride  # after everything
        self._far = far
        self.first = [self.end + 1] * n  # backward step that reads a value first, end + 1 for none
        last = [-1] * n
        for at, i in enumerate(live):
            for source in (*values[i].inputs, *values[i].holds):
                if self.first[source] > at:
                    self.first[source] = at
                last[source] = at * self.stride + n
        for i in facts.backward_outputs:
            self.first[i] = min(self.first[i], self.end)
            last[i] = far
        self.last = last
        self.order = [
            v.index for v in reversed(values) if v.side == "forward"
        ]  # the order of the pass
        always = {
            s for v in values if v.side == "input" and v.role != "tangent" for s in v.storages
        }
        own = [v for v in values if v.role in ("parameter", "buffer")]
        held = {s for v in own for s in v.storages}
        inputs = always - held
        size = facts.storage_bytes
        self.base = max(facts.parameter_bytes, sum(size[s] for s in held)) + sum(
            size[s] for s in inputs
        )
        self._always = always
        count = len(size)
        self.birth = np.full(count, far, dtype=np.int64)
        self.death = np.full(count, -1, dtype=np.int64)
        steps = [(-1, v.index) for v in values if v.role == "tangent"]
        steps += [(at * self.stride + n, i) for at, i in enumerate(live)]
        for key, i in steps:
            for s in values[i].storages:
                self.birth[s] = min(self.birth[s], key)
                self.death[s] = max(self.death[s], last[i] if last[i] >= 0 else far)
        self.sizes = np.array([0 if s in always else b for s, b in enumerate(size)], dtype=np.int64)
        self.held = [
            tuple(s for s in v.storages if s not in always) if v.side == "forward" else ()
            for v in values
        ]

    def _forward(self) -> None:
        """The part of forward that runs whatever is saved; what only backward needs is `_extra`."""
        facts, values = self.facts, self.facts.values
        core = set(facts.forward_outputs)
        core.update(v.index for v in values if v.side == "forward" and must_run(v))
        for v in reversed(values):
            if v.index in core and v.side == "forward":
                core.update(v.inputs)
        n = len(values)
        count = len(facts.storage_bytes)
        self.forward_birth = np.full(count, n, dtype=np.int64)
        self.forward_death = np.full(count, -1, dtype=np.int64)
        last = [-1] * n
        for v in facts.forward:
            if v.index in core:
                for i in (*v.inputs, *v.holds):
                    last[i] = v.index
        for i in facts.forward_outputs:
            last[i] = n
        # a value that runs for its effect is dropped after a reader that runs only for backward
        self._unread = {i for i in core if values[i].side == "forward" and last[i] < 0}
        self._extra = [i for i in self.order if i not in core or i in self._unread]
        for v in facts.forward:
            if v.index in core:
                for s in self.held[v.index]:
                    self.forward_birth[s] = min(self.forward_birth[s], v.index)
                    self.forward_death[s] = max(self.forward_death[s], last[v.index])

    def mask(self, saved_roots: Collection[int]) -> bytes:
        """The mask that saves these of the free roots."""
        chosen = set(saved_roots)
        return bytes(root in chosen for root in self.free)

    def roots(self, mask: bytes) -> tuple[int, ...]:
        """The free roots that a mask saves."""
        return tuple(root for root, kept in zip(self.free, mask, strict=True) if kept)

    def kept_roots(self, saved: Collection[int]) -> tuple[int, ...]:
        """The free roots whose being saved makes these values saved."""
        return tuple(sorted({self.free[self.slot[i]] for i in saved if self.slot[i] >= 0}))

    def never_saved(self, index: int) -> bool:
        """Whether no mask keeps this value."""
        return self.slot[index] == _NEVER

    def always_saved(self, index: int) -> bool:
        """Whether every mask keeps this value where backward needs it."""
        return self.slot[index] == _ALWAYS

    def bytes_of(self, index: int) -> int:
        """Bytes of the storages a value lives in, those alive throughout not counted."""
        return sum(int(self.sizes[s]) for s in self.held[index])

    def earliest(self) -> list[int]:
        """The first backward step that can need each value: that of recomputing all."""
        if self._earliest is None:
            self._earliest = self._reach(bytes(len(self.free)) + b"\0\1")[3]
        return self._earliest

    def peak_step(self, mask: bytes) -> tuple[Literal["forward", "backward"], int]:
        """Where the peak is: the index of a forward value, or a step of `live_backward`."""
        saved, again, last, _ = self._reach(mask + b"\0\1")
        ahead, at = self._forward_peak(saved)
        behind, key = self._backward_peak(saved, again, last)
        if ahead >= behind:
            return "forward", at
        return "backward", min(max(key // 2 // self.stride, 0), self.end)

    def __call__(self, mask: bytes) -> Outcome:
        found = self._known.get(mask)
        if found is None:
            found = self._known[mask] = self._evaluate(mask)
        return found

    def _evaluate(self, mask: bytes) -> Outcome:
        full = mask + b"\0\1"
        saved, again, last, _ = self._reach(full)
        peak = max(self._forward_peak(saved)[0], self._backward_peak(saved, again, last)[0])
        values = self.facts.values
        time = math.fsum(values[i].time_s for i, _ in again)
        return Outcome(self.base + peak, time, tuple(sorted(saved)))

    def _reach(self, full: bytes) -> tuple[list[int], list[tuple[int, int]], list[int], list[int]]:
        """Saved values, recomputed ones with their keys, keys of last reads, and all T."""
        at, last = self.first.copy(), self.last.copy()
        never, stride = self.end + 1, self.stride
        slot, parents = self.slot, self.parents
        saved: list[int] = []
        again: list[tuple[int, int]] = []
        for i in self.order:
            step = at[i]
            if step == never:
                continue
            if full[slot[i]]:
                saved.append(i)
                continue
            key = step * stride + i
            again.append((i, key))
            for parent in parents[i]:
                if step < at[parent]:
                    at[parent] = step
                if key > last[parent]:
                    last[parent] = key
        return saved, again, last, at

    def _backward_peak(
        self, saved: list[int], again: list[tuple[int, int]], last: list[int]
    ) -> tuple[int, int]:
        if not self.end and not again:
            return 0, 0
        birth, death = self.birth.copy(), self.death.copy()
        held = self.held
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for i in saved:
            end = last[i]
            for s in held[i]:
                births[s] = -1
                if end > deaths.get(s, -1):
                    deaths[s] = end
        for i, key in again:
            end = last[i]
            for s in held[i]:
                if key < births.get(s, key + 1):
                    births[s] = key
                if end > deaths.get(s, -1):
                    deaths[s] = end
        if births:
            at = np.fromiter(births, dtype=np.int64, count=len(births))
            keys = np.fromiter(births.values(), dtype=np.int64, count=len(births))
            birth[at] = np.minimum(birth[at], keys)
            at = np.fromiter(deaths, dtype=np.int64, count=len(deaths))
            keys = np.fromiter(deaths.values(), dtype=np.int64, count=len(deaths))
            death[at] = np.maximum(death[at], keys)
        alive = birth < self._far
        sizes = self.sizes[alive]
        # births come before deaths of the same step: a value lives through its last reader
        keys = np.concatenate((2 * birth[alive], 2 * death[alive] + 1))
        change = np.concatenate((sizes, -sizes))
        order = np.argsort(keys, kind="stable")
        return _highest(np.cumsum(change[order]), keys[order])

    def _forward_peak(self, saved: list[int]) -> tuple[int, int]:
        birth, death = self.forward_birth, self.forward_death.copy()
        n = len(self.facts.values)
        kept = [s for i in saved for s in self.held[i]]
        death[kept] = n
        if self._extra:
            birth = birth.copy()
            self._add_extra(birth, death, set(saved))
        alive = birth < n
        change = np.zeros(n + 2, dtype=np.int64)
        np.add.at(change, birth[alive], self.sizes[alive])
        np.subtract.at(change, death[alive] + 1, self.sizes[alive])
        return _highest(np.cumsum(change), np.arange(n + 2))

    def _add_extra(self, birth: np.ndarray, death: np.ndarray, saved: set[int]) -> None:
        """Values that forward computes only because something saved comes from them."""
        n = len(self.facts.values)
        needed = set(self._unread)
        last: dict[int, int] = {}
        for i in self._extra:
            if i not in needed and i not in saved:
                continue
            for parent in self.parents[i]:
                needed.add(parent)
                last[parent] = max(last.get(parent, -1), i)
            end = n if i in saved else last.get(i, n)
            for s in self.held[i]:
                birth[s] = min(birth[s], i)
                death[s] = max(death[s], end)
        for i, end in last.items():
            for s in self.held[i]:  # of core values too: they may be read later now
                death[s] = max(death[s], end)


def _highest(alive: np.ndarray, keys: np.ndarray) -> tuple[int, int]:
    if not len(alive):
        return 0, 0
    at = int(alive.argmax())
    return int(alive[at]), int(keys[at])


def _slot(facts: Facts, fixed: Mapping[int, Action], slot_of: Mapping[int, int], index: int) -> int:
    """Where a mask says whether this value is saved; as `effective_action` reads a decision."""
    i = index
    while True:
        value = facts.values[i]
        if i in slot_of and not must_be_saved(facts, i) and value.op != "get_attr":
            return slot_of[i]
        if must_be_saved(facts, i) or value.follows is None or value.side == "input":
            saves = effective_action(facts, fixed, i) == "save"
            return _ALWAYS if saves else _NEVER
        i = value.follows
