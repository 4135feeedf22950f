"""The columns of the budget's linear program: what is said of each forward value.

Of the values that backward may need each has ``a`` (it must be at hand in backward) and ``r <= a`` (it is
computed again), as `relax` states them. A value that is never kept has ``r = a``, one that is always kept
has no ``r``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .evaluate import Evaluator
from .program import add


class Columns:
    """Columns of one evaluator.

    Attributes:
        values: the forward values that backward may need, ascending.
        a, r: column of each; ``r`` is None where a value is always kept.
        low: lower bound of each column; 1 where backward itself reads the value.
        pairs: (column, a column that it is at most).
        readers: by value, those that need it to be computed again.
        owner: by storage, the value that it is charged to where it is kept.
        holder: by storage, the first value that lives in it.
        hold: by value, the last backward step at which it is alive where it is kept.
        intervals: by storage, first and last reads of backward.
    """

    def __init__(self, evaluator: Evaluator, tied: Mapping[int, int]) -> None:
        self.ev = ev = evaluator
        values = ev.facts.values
        never = ev.end + 1
        needed = {i for i in ev.order if ev.first[i] != never}
        for i in ev.order:  # from last to first
            if i in needed and not ev.always_saved(i):
                needed.update(ev.parents[i])
        self.values = sorted(needed)
        self.a: dict[int, int] = {}
        self.r: dict[int, int | None] = {}
        low: list[float] = []
        self.tied = tied

        def kind(i: int) -> tuple[bool, bool]:
            return ev.never_saved(i), ev.always_saved(i)

        for i in self.values:
            direct = ev.first[i] != never
            one = tied.get(i, i)
            if one in self.a and kind(one) == kind(i):
                self.a[i], self.r[i] = self.a[one], self.r[one]
                low[self.a[i]] = max(low[self.a[i]], float(direct))
                continue
            self.a[i] = len(low)
            low.append(1.0 if direct else 0.0)
            if ev.never_saved(i):
                self.r[i] = self.a[i]
            elif ev.always_saved(i):
                self.r[i] = None
            else:
                self.r[i] = len(low)
                low.append(0.0)
        self.low = low
        self.readers: dict[int, list[int]] = {i: [] for i in self.values}
        pairs = set()
        for i in self.values:
            again = self.r[i]
            if again is None:
                continue
            for u in ev.parents[i]:
                self.readers[u].append(i)
            for above in (self.a[i], *(self.a[u] for u in ev.parents[i])):
                if above != again and low[above] == 0.0:
                    pairs.add((again, above))
        self.pairs = sorted(pairs)
        self.time_unit = sum(values[i].time_s for i in self.values) or 1.0
        self.byte_unit = sum(ev.bytes_of(i) for i in self.values) or 1
        self._owners()

    def _owners(self) -> None:
        """The value that each storage is charged to where it is kept, and how long it then lives."""
        ev, values = self.ev, self.ev.facts.values
        self.owner: dict[int, int] = {}
        self.holder: dict[int, int] = {}
        for i in self.values:
            for s in ev.held[i]:
                self.holder.setdefault(s, i)
            if not ev.never_saved(i):
                for s in ev.held[i]:
                    self.owner[s] = i  # of several the last: a wait, not its collective
        self.hold = dict.fromkeys(self.values, -1)
        self.intervals: dict[int, list[tuple[int, int]]] = {}
        for i in self.values:
            first, last = ev.first[i], ev.last[i] // ev.stride
            if first > ev.end:
                continue
            for s in ev.held[i]:
                self.intervals.setdefault(s, []).append((first, last))
            up: int | None = i
            while up is not None and values[up].side == "forward":
                if up in self.hold:
                    self.hold[up] = max(self.hold[up], last)
                up = values[up].follows
        early = ev.earliest()
        for i in self.values:
            # what is needed only to compute another again is dropped before the step that reads that
            self.hold[i] = max(self.hold[i], early[i] - 1)

    def kept(self, i: int, size: float, terms: dict[int, float]) -> float:
        """Add ``size * s_i`` to `terms`; the part of it that is constant comes back."""
        again = self.r[i]
        if again == self.a[i]:
            return 0.0
        if again is not None:
            add(terms, again, -size)
        if self.low[self.a[i]] == 1.0:
            return size
        add(terms, self.a[i], size)
        return 0.0
