"""The curve of peak against recompute time, and the point of it that a budget asks for.

Points are outcomes of the exact evaluation, ascending in peak and strictly descending in time. Up to
`EXACT` free values all save sets are evaluated, and the curve is the true one.

Beyond that a budget B is sought by bisection between two points, the one of least peak found and the
one that recomputes least. A *bracket* is a pair of neighbouring points (x, y). Its candidates come from
x and y alone: what branch and bound on the program of `relax` finds within the peak halfway; where that
is nothing new, within a peak nearer to y, a few times; and last what the linear program proposes, the
points known from the start (stages among them), and the save sets that take x's decision before a
position in the forward pass and y's from there on. Candidates that lie between x and y in peak and in
time refine the bracket; the next one is the pair of neighbours around B. What B decides is only which
way to turn, so that of two budgets that part ways at a bracket the smaller one ends at or before the
point where the larger one starts: a larger budget never costs more time, and a smaller one never raises
the peak.

Equal layers are kept alike as far as the budget allows: their decisions are sorted, so that those that
differ are runs of neighbours.

Complexity: a bracket costs a few programs and evaluations; depth and candidates are bounded by
constants. On larger graphs the program that is branched on takes runs of neighbouring equal layers as one
(`tied_values`), so that it does not grow with depth; without equal layers, and past `_BRANCHED` columns,
linear programs alone propose. Deterministic: all choices are by exact bytes, times and positions, and
limits count nodes, never seconds. Weaknesses: beyond `EXACT` values neither the curve nor its least peak
is proven to be best; `bound_s` says how far a point can be off, by branch and bound on the program in
which nothing is tied, cut short at its root on larger graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from .evaluate import Evaluator
from .layers import equal_layers, tied_values
from .relax import Relaxation
from .rows import Step

EXACT = 12
_DEPTH = 24  # brackets on the way to a budget
_FAILURES = 6  # of branch and bound in one bracket, ever closer to its upper end
_ROUNDS = 3  # of rows added to one program
_SPLITS = 24  # positions tried in one bracket
_RUNS = 4  # of neighbouring equal layers that branch and bound takes as one on larger graphs
_COLUMNS = 900  # of a program from which on equal layers are tied in it
_BRANCHED = 2000  # of a program up to which branch and bound is used
_NODES = 50
_BOUND_NODES = 2000  # for the one lower bound of a budget's answer
_CLOSE = 0.01  # a bound nearer than this part to what was found is not made better on large graphs
_ROOT = 20_000  # columns up to which the root of branch and bound gives a better bound
_LOW = 2  # points of least peak that branch and bound improves before there are brackets
_GOALS = 2  # peaks aimed at on large graphs before there are brackets
_WIDTH = 20000  # a bracket narrower than this part of the whole curve is not refined
_NO_TIME = 0.0005  # nor one whose ends differ in time by less than this part
_PRICES = tuple(2.0**k for k in range(8, -11, -1))


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One point of the curve.

    Attributes:
        peak_bytes: predicted peak.
        recompute_time_s: seconds of what backward computes again.
        saved: the forward values kept, ascending.
        roots: the free values to save; all other free ones are recomputed where they are needed.
    """

    peak_bytes: int
    recompute_time_s: float
    saved: tuple[int, ...] = field(repr=False)  # hundreds
    roots: tuple[int, ...] = field(repr=False)
    mask: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class _Bracket:
    """Two neighbouring points, and what was found out between them.

    Attributes:
        steps: rows of use.
        failed: how often in a row branch and bound has found nothing between them.
        floor: below this peak nothing better than x was found.
    """

    x: ParetoPoint
    y: ParetoPoint
    steps: frozenset[Step]
    failed: int = 0
    floor: Fraction = Fraction(0)


class Curve:
    """Points of one evaluator; `at` finds one for a budget, `points` lists them.

    Args:
        evaluator: outcomes of masks.
        seeds: masks to start from, besides those of the linear program.
        exact: most free values up to which all save sets are compared.
    """

    def __init__(
        self, evaluator: Evaluator, seeds: Iterable[bytes] = (), exact: int = EXACT
    ) -> None:
        self.ev = evaluator
        self.layers = equal_layers(evaluator.facts, evaluator.free)
        self.exact = len(evaluator.free) <= exact
        self._others: tuple[bytes, ...] = ()
        self._refined: dict[_Bracket, tuple[_Bracket, ...]] = {}
        if self.exact:
            self._full: Relaxation | None = None
            every = itertools.product((0, 1), repeat=len(evaluator.free))
            self._ends = self._front(map(bytes, every))
        else:
            self._full = self._program = Relaxation(evaluator)
            if self._full.columns > _COLUMNS:
                self._program = Relaxation(evaluator, tied_values(self.layers, _RUNS))
            self._ends = self._start(seeds)

    @property
    def smallest_bytes(self) -> int:
        """The least peak found; the least there is where `exact`."""
        return self._ends[0].peak_bytes

    def at(self, budget_bytes: int) -> ParetoPoint | None:
        """The point of least time with a peak of at most `budget_bytes`, None where there is none."""
        if budget_bytes < self.smallest_bytes:
            return None
        if self.exact or budget_bytes >= self._ends[-1].peak_bytes:
            return [p for p in self._ends if p.peak_bytes <= budget_bytes][-1]
        around = self._pick(self._brackets(), budget_bytes)
        for _ in range(_DEPTH if self._can_branch else 6):
            finer = self._refine(around)
            if finer == (around,):
                break
            around = self._pick(finer, budget_bytes)
        return around.x

    def points(self, depth: int = 4) -> tuple[ParetoPoint, ...]:
        """The curve, each bracket refined up to `depth` times."""
        if self.exact or len(self._ends) == 1:
            return tuple(self._ends)
        brackets = self._brackets()
        for _ in range(depth):
            brackets = tuple(b for bracket in brackets for b in self._refine(bracket))
        # of two of one peak the later takes less time, of two of one time the earlier holds less
        least = {p.peak_bytes: p for p in (*(b.x for b in brackets), brackets[-1].y)}
        return tuple({p.recompute_time_s: p for p in reversed(least.values())}.values())[::-1]

    def bound_s(self, point: ParetoPoint, budget_bytes: int) -> float:
        """A time that no save set within `budget_bytes` falls below."""
        if self._full is None or not point.recompute_time_s:
            return point.recompute_time_s
        near = sorted(self._ends, key=lambda p: abs(p.peak_bytes - budget_bytes))
        steps = set(self._steps(p.mask for p in (point, *near[: self._most_rows // 2])))
        # on large graphs first without branch and bound, which is slow there and often not needed
        large = self._full.columns > _COLUMNS
        bound = self._bound(self._full, budget_bytes, steps, 0 if large else _BOUND_NODES)
        if large and (1 - _CLOSE) * point.recompute_time_s > bound and self._full.columns < _ROOT:
            bound = max(bound, self._bound(self._full, budget_bytes, steps, 1))
        return min(bound, point.recompute_time_s)

    def _bound(
        self, program: Relaxation, budget_bytes: int, steps: Iterable[Step], nodes: int
    ) -> float:
        rows, bound = set(steps), 0.0
        for _ in range(_ROUNDS):
            relaxed = program.within(budget_bytes, rows, nodes)
            if relaxed is None:
                break  # there is a point within: only rounding can say otherwise
            bound = max(bound, relaxed.time_s)
            more = self._steps(relaxed.masks) - rows
            if not more or len(rows | more) > 2 * self._most_rows:
                break
            rows |= more
        return bound

    @property
    def _can_branch(self) -> bool:
        return self._full is not None and self._program.columns <= _BRANCHED

    @property
    def _most_rows(self) -> int:
        return 8 if self._can_branch else 4

    def _steps(self, masks: Iterable[bytes]) -> frozenset[Step]:
        """Where these have their peaks; of a step of backward also the one before.

        What is kept only to compute something again before a step counts in the row before it.
        """
        found: set[Step] = set()
        for side, at in map(self.ev.peak_step, masks):
            found.add((side, at))
            if side == "backward" and at:
                found.add((side, at - 1))
        return frozenset(found)

    def _brackets(self) -> tuple[_Bracket, ...]:
        return tuple(
            _Bracket(x, y, self._steps((x.mask, y.mask))) for x, y in itertools.pairwise(self._ends)
        )

    @staticmethod
    def _pick(brackets: Iterable[_Bracket], budget_bytes: int) -> _Bracket:
        return next(b for b in brackets if b.x.peak_bytes <= budget_bytes < b.y.peak_bytes)

    def _refine(self, bracket: _Bracket) -> tuple[_Bracket, ...]:
        """Finer brackets from one end to the other; itself alone where nothing lies between."""
        if bracket not in self._refined:
            x, y = bracket.x, bracket.y
            floor = max(bracket.floor, Fraction(x.peak_bytes))
            self._refined[bracket] = (bracket,)
            saved_s = x.recompute_time_s - y.recompute_time_s
            if (
                y.peak_bytes - floor
            ) * _WIDTH > self._range() and saved_s > _NO_TIME * x.recompute_time_s:
                self._refined[bracket] = self._between(bracket, (floor + y.peak_bytes) / 2)
        return self._refined[bracket]

    def _between(self, bracket: _Bracket, goal: Fraction) -> tuple[_Bracket, ...]:
        x, y, steps, failed = bracket.x, bracket.y, bracket.steps, bracket.failed
        inside: list[ParetoPoint] = []
        if self._can_branch and failed < _FAILURES:
            masks, steps = self._propose(self._program, goal, steps, _NODES)
            inside = self._inside(x, y, masks)
            failed = 0 if inside else failed + 1
            if not inside and failed < _FAILURES:
                return (_Bracket(x, y, steps, failed, goal),)
        if not inside:
            assert self._full is not None
            masks, steps = self._propose(self._full, goal, steps)
            inside = self._inside(x, y, masks)
        if not inside:
            others = (*self._others, *self._splits(x.mask, y.mask))
            inside = self._inside(x, y, others)
            if not inside:
                return (bracket,)
        return tuple(
            _Bracket(a, b, steps, failed, bracket.floor)
            for a, b in itertools.pairwise((x, *inside, y))
        )

    def _inside(self, x: ParetoPoint, y: ParetoPoint, masks: Iterable[bytes]) -> list[ParetoPoint]:
        return [
            p
            for p in self._front(masks)
            if x.peak_bytes <= p.peak_bytes < y.peak_bytes
            and y.recompute_time_s <= p.recompute_time_s < x.recompute_time_s
        ]

    def _range(self) -> int:
        return self._ends[-1].peak_bytes - self._ends[0].peak_bytes

    def _point(self, mask: bytes) -> ParetoPoint:
        outcome = self.ev(mask)
        roots = self.ev.kept_roots(outcome.saved)
        return ParetoPoint(
            outcome.peak_bytes, outcome.time_s, outcome.saved, roots, self.ev.mask(roots)
        )

    def _front(self, masks: Iterable[bytes]) -> list[ParetoPoint]:
        """Of these the points that no other beats, ascending in peak."""
        found = [self._point(m) for m in dict.fromkeys(masks)]
        found.sort(key=lambda p: (p.peak_bytes, p.recompute_time_s, p.saved))
        front: list[ParetoPoint] = []
        for point in found:
            if not front or point.recompute_time_s < front[-1].recompute_time_s:
                front.append(point)
        return front

    def _start(self, seeds: Iterable[bytes]) -> list[ParetoPoint]:
        count = len(self.ev.free)
        masks = [bytes(count), b"\1" * count, *seeds, *self._program.priced(_PRICES)]
        front = self._front(masks)
        # aim at ever smaller peaks: halfway to the least found, or up again where nothing is found
        low = Fraction(self.ev.base)
        for _ in range(_DEPTH // 2 if self._can_branch else 2):
            least = front[0].peak_bytes
            steps = self._steps(p.mask for p in front[: self._most_rows // 2])
            if (least - low) * _WIDTH <= least - self.ev.base:
                break
            goal = (low + least) / 2
            masks, _ = self._propose(self._program, goal, steps)
            front = self._front([*(p.mask for p in front), *masks])
            if front[0].peak_bytes == least:
                low = goal
        if self._can_branch:
            # the lowest peaks depend on steps that the linear program did not know of
            for point in front[:_LOW] if self._program.columns <= _COLUMNS else ():
                steps = self._steps((point.mask,))
                masks = self._propose(self._program, Fraction(point.peak_bytes), steps, _NODES)[0]
                front = self._front([*(p.mask for p in front), *masks])
            # branch and bound does better than what is known in between
            self._others = tuple(p.mask for p in front[1:-1])
            return [front[0], front[-1]] if len(front) > 1 else front
        # seeds and low peaks leave points with time to spare: aim at peaks all along the curve
        first, last = front[0].peak_bytes, front[-1].peak_bytes
        goals = [first + Fraction((last - first) * k, _GOALS) for k in range(_GOALS)]
        masks = [p.mask for p in front]
        for goal in goals:
            near = sorted(front, key=lambda p: abs(p.peak_bytes - goal))[:2]
            masks += self._propose(self._program, goal, self._steps(p.mask for p in near))[0]
        return self._front(masks)

    def _propose(
        self, program: Relaxation, goal: Fraction, steps: Iterable[Step], nodes: int = 0
    ) -> tuple[list[bytes], frozenset[Step]]:
        """Masks of the program for a peak; rows are added where its answers have theirs."""
        rows = set(steps)
        found: list[bytes] = []
        for _ in range(_ROUNDS):
            relaxed = program.within(goal, rows, nodes)
            if relaxed is None:
                break
            found = [self._arranged(mask) for mask in relaxed.masks]
            # one row more: that of the answer that is furthest above the goal
            over = sorted(relaxed.masks, key=lambda m: -self.ev(m).peak_bytes)
            new = next((s for m in over if (s := self._steps((m,)) - rows)), None)
            if not new or len(rows) >= self._most_rows:
                break
            rows |= new
        return found, frozenset(rows)

    def _arranged(self, given: bytes) -> bytes:
        """The mask with the decisions of equal layers sorted: those that keep least come first.

        A layer's kept bytes are alive in the backward of all layers after it, so that no order of
        the same decisions holds less there. Where it still costs peak or time, the mask as given.
        """
        mask = bytearray(given)
        for layers in self.layers:
            parts = sorted(
                (
                    sum(self.ev.bytes_of(self.ev.free[k]) for k in layer.slots if given[k]),
                    bytes(given[k] for k in layer.slots),
                )
                for layer in layers
            )
            for layer, (_, part) in zip(layers, parts, strict=True):
                for k, kept in zip(layer.slots, part, strict=True):
                    mask[k] = kept
        before, after = self.ev(given), self.ev(bytes(mask))
        worse = after.peak_bytes > before.peak_bytes or after.time_s > before.time_s
        return given if worse else bytes(mask)

    def _splits(self, first: bytes, last: bytes) -> list[bytes]:
        """Masks that take `first` before a position and `last` from there on."""
        differ = [k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
        if len(differ) > _SPLITS:
            differ = [differ[k * len(differ) // _SPLITS] for k in range(_SPLITS)]
        return [first[:k] + last[k:] for k in differ]
