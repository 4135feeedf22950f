"""The curve of peak against recompute time, and the point of it that a budget asks for.

Points are outcomes of the exact evaluation, ascending in peak and strictly descending in time. Up to
`EXACT` free values all save sets are evaluated, and the curve is the true one.

Beyond that a budget B is sought by bisection between two points, the one of least peak found and the
one that recomputes least. A *bracket* is a pair of neighbouring points (x, y). Its candidates come from
x and y alone: what the linear program of `relax` proposes for peaks between theirs, and the save sets
that take x's decision before a position in the forward pass and y's from there on. Candidates that lie
between x and y in peak and in time refine the bracket; the next bracket is the pair of neighbours around
B. What B decides is only which way to turn, so that for two budgets that part ways at a bracket the
smaller one ends at or before the point where the larger one starts: a larger budget never costs more
time, and a smaller one never raises the peak. Within a bracket the prefix that differs from the rest is
what makes equal layers decide alike but for one run of them.

Complexity: a bracket costs some linear programs and evaluations, each near linear in the graph; depth
and candidates are bounded by constants. Deterministic: all choices are by exact bytes, times and
positions. Weaknesses: beyond `EXACT` values neither the curve nor its least peak is proven to be
best; `bound_s` says how far a point can be off. Peaks that come from values recomputed early through
more than a few links are seen by the evaluation but not by the linear program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from .evaluate import Evaluator
from .relax import Relaxation, Step

EXACT = 12
_DEPTH = 12  # brackets on the way to a budget
_ROUNDS = 3  # of rows added to one linear program
_SPLITS = 24  # positions tried in one bracket
_WIDTH = 2000  # a bracket narrower than this part of the whole curve is not refined
_PRICES = tuple(2.0**k for k in range(8, -11, -1))


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One point of the curve.

    Attributes:
        peak_bytes: predicted peak.
        recompute_time_s: seconds of what backward computes again.
        saved: the forward values kept, ascending.
        mask: by free value, whether it is saved.
    """

    peak_bytes: int
    recompute_time_s: float
    saved: tuple[int, ...]
    mask: bytes


class Curve:
    """Points of one evaluator; `at` finds one for a budget, `points` lists them.

    Args:
        evaluator: outcomes of masks.
        seeds: masks to start from, besides those of the linear program.
    """

    def __init__(self, evaluator: Evaluator, seeds: Iterable[bytes] = ()) -> None:
        self.ev = evaluator
        self.exact = len(evaluator.free) <= EXACT
        if self.exact:
            self._relaxation: Relaxation | None = None
            every = itertools.product((0, 1), repeat=len(evaluator.free))
            self._ends = self._front(map(bytes, every))
        else:
            self._relaxation = Relaxation(evaluator)
            self._ends = self._start(seeds)

    @property
    def smallest_bytes(self) -> int:
        """The least peak found; the least there is where `exact`."""
        return self._ends[0].peak_bytes

    def at(self, budget_bytes: int) -> ParetoPoint | None:
        """The point of least time with a peak of at most `budget_bytes`, None where there is none."""
        x, y = _around(self._ends, budget_bytes)
        if x is None or y is None or self.exact:
            return x
        steps = frozenset((self.ev.peak_step(x.mask), self.ev.peak_step(y.mask)))
        for _ in range(_DEPTH):
            if (y.peak_bytes - x.peak_bytes) * _WIDTH <= self._range():
                break
            inside, steps = self._between(x, y, steps)
            if not inside:
                break
            nearer, further = _around([x, *inside, y], budget_bytes)
            assert nearer is not None and further is not None
            x, y = nearer, further
        return x

    def points(self, depth: int = 3) -> tuple[ParetoPoint, ...]:
        """The curve, each bracket refined `depth` times."""
        if self.exact:
            return tuple(self._ends)
        curve = list(self._ends)
        for _ in range(depth):
            finer = curve[:1]
            for x, y in itertools.pairwise(curve):
                if (y.peak_bytes - x.peak_bytes) * _WIDTH > self._range():
                    steps = frozenset((self.ev.peak_step(x.mask), self.ev.peak_step(y.mask)))
                    finer += self._between(x, y, steps)[0]
                finer.append(y)
            curve = finer
        return tuple(curve)

    def bound_s(self, point: ParetoPoint, budget_bytes: int) -> float:
        """A time that no save set within `budget_bytes` falls below."""
        if self._relaxation is None or not point.recompute_time_s:
            return point.recompute_time_s
        steps = {self.ev.peak_step(p.mask) for p in (point, *self._ends)}
        bound = 0.0
        for _ in range(_ROUNDS):
            relaxed = self._relaxation.within(budget_bytes, steps)
            if relaxed is None:  # the point itself holds, so only rounding can say so
                break
            bound = max(bound, relaxed.time_s)
            more = {self.ev.peak_step(m) for m in relaxed.masks[:2]} - steps
            if not more:
                break
            steps |= more
        return min(bound, point.recompute_time_s)

    def _range(self) -> int:
        return self._ends[-1].peak_bytes - self._ends[0].peak_bytes

    def _point(self, mask: bytes) -> ParetoPoint:
        outcome = self.ev(mask)
        return ParetoPoint(outcome.peak_bytes, outcome.time_s, outcome.saved, mask)

    def _front(self, masks: Iterable[bytes]) -> list[ParetoPoint]:
        """Of these the points that no other beats, ascending in peak."""
        found = [self._point(m) for m in dict.fromkeys(masks)]
        found.sort(key=lambda p: (p.peak_bytes, p.recompute_time_s, p.saved, p.mask))
        front: list[ParetoPoint] = []
        for point in found:
            if not front or point.recompute_time_s < front[-1].recompute_time_s:
                front.append(point)
        return front

    def _start(self, seeds: Iterable[bytes]) -> list[ParetoPoint]:
        assert self._relaxation is not None
        count = len(self.ev.free)
        masks = [bytes(count), b"\1" * count, *seeds, *self._relaxation.priced(_PRICES)]
        front = self._front(masks)
        # below the least peak so far: aim at ever smaller peaks while that still finds one
        low = Fraction(0)
        steps = {self.ev.peak_step(p.mask) for p in front}
        for _ in range(_DEPTH):
            goal = (low + front[0].peak_bytes) / 2
            before = front[0].peak_bytes
            masks, steps = self._propose(goal, frozenset(steps), None)
            if masks:
                front = self._front([p.mask for p in front] + masks)
            if front[0].peak_bytes == before:
                low = goal
        return front

    def _between(
        self, x: ParetoPoint, y: ParetoPoint, steps: frozenset[Step]
    ) -> tuple[list[ParetoPoint], frozenset[Step]]:
        """Points strictly between two, and the rows that were of use."""
        middle = Fraction(x.peak_bytes + y.peak_bytes, 2)
        masks, steps = self._propose(middle, steps, x)
        masks += self._splits(x.mask, y.mask)
        inside = [
            p
            for p in self._front(masks)
            if x.peak_bytes < p.peak_bytes < y.peak_bytes
            and y.recompute_time_s < p.recompute_time_s < x.recompute_time_s
        ]
        return inside, steps

    def _propose(
        self, goal: Fraction, steps: Iterable[Step], floor: ParetoPoint | None
    ) -> tuple[list[bytes], frozenset[Step]]:
        """Masks of the linear program for a peak; rows are added where its answers have theirs."""
        assert self._relaxation is not None
        rows = set(steps)
        found: list[bytes] = []
        for _ in range(_ROUNDS):
            relaxed = self._relaxation.within(goal, rows)
            if relaxed is None:
                break
            found += relaxed.masks
            more = {self.ev.peak_step(m) for m in relaxed.masks} - rows
            if not more:
                break
            rows |= more
        return found, frozenset(rows)

    def _splits(self, first: bytes, last: bytes) -> list[bytes]:
        """Masks that take `first` before a position and `last` from there on."""
        differ = [k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
        if len(differ) > _SPLITS:
            differ = [differ[k * len(differ) // _SPLITS] for k in range(_SPLITS)]
        return [first[:k] + last[k:] for k in differ]


def _around(
    points: list[ParetoPoint], budget_bytes: int
) -> tuple[ParetoPoint | None, ParetoPoint | None]:
    """The last point within the budget and the first beyond it."""
    within = [p for p in points if p.peak_bytes <= budget_bytes]
    beyond = points[len(within) :]
    return (within[-1] if within else None), (beyond[0] if beyond else None)
