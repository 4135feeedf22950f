"""The linear program behind the budget: candidates near an optimum, and a proven lower bound.

For each forward value v that backward may need let a_v say that it must be at hand in backward and
r_v <= a_v that it is computed again; s_v = a_v - r_v says that it is kept. Then

    (need)       a_v = 1               where a backward value reads v;
    (inputs)     r_v <= a_u            for each input u of v: what is computed again needs its inputs;
    (decided)    r_v = a_v or r_v = 0  where v cannot be kept, or must be;
    (time)       sum of t_v r_v        is the recompute time.

These compare two variables each, so that every vertex is integral: at a price p per byte,
``min sum t_v r_v + p sum b_v s_v`` is a minimum cut, and its optimum a save set (`priced`).

`within` adds rows of memory. Let W be the budget less what is alive throughout. At backward step q

    (backward)   c_q + sum b_v s_v + sum b_v y_v <= W

where c_q counts the storages of backward values alive then, and of values that backward reads both at
or before and at or after q: these are at hand at the first and dropped after the last of these reads.
The first sum is over other v whose storage backward reads after q: kept, they are alive. The second is
over the same v where they are computed again as early as q because something read at or before q is:
y_v >= r_c for such a reader c of v, y_v >= y_c - s_c further up. At forward step q

    (forward)    f_q + sum b_v s_v <= W

where f_q counts what forward itself still reads, and the sum is over other v computed at or before q.
All else is taken to be absent, so that each row holds for every save set within the budget, and the
optimum is at most its time. With these rows vertices are fractional. Cutting a and r at one threshold
keeps all constraints but the rows of memory, which gives save sets near the budget; the exact
evaluation decides which of them hold.

Sizes and times enter as quotients by a total, correctly rounded: multiplying all sizes changes nothing.
To keep equal layers alike where the program does not care, keeping costs a shade more in early layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import highspy
import numpy as np

from ..errors import SolverError
from .evaluate import Evaluator
from .hints import root_of

_SOLVER: Any = highspy.Highs.__base__  # the class on top of it prints a banner when it is made
_INFINITY = highspy.kHighsInf
_TILT = 1e-6  # of the time of all: what it costs to keep everything in the first rather than the last layer
_MIP_GAP = 0.002
_TINY = 500  # columns up to which branch and bound goes to the end, if its nodes allow
_ITERATIONS = 1  # of the simplex method, a column or row
_CHAINS, _LINKS = 4, 6
_PENDING = 64  # values of a row whose early recomputation is followed

Step = tuple[Literal["forward", "backward"], int]


@dataclass(frozen=True, slots=True)
class Relaxed:
    """An optimum of the program.

    Attributes:
        time_s: its value without the tilt, at most the time of every save set within the budget.
        masks: save sets cut from it, those that keep least first.
    """

    time_s: float
    masks: tuple[bytes, ...]


class Relaxation:
    """The program of one evaluator; rows of memory are made once for each step."""

    def __init__(self, evaluator: Evaluator) -> None:
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
        for i in self.values:
            self.a[i] = len(low)
            direct = ev.first[i] != never
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
        self._rows: dict[Step, _Row] = {}

    def _owners(self) -> None:
        """The value that each storage is charged to where it is kept, and how long it then lives."""
        ev, values = self.ev, self.ev.facts.values
        self.owner: dict[int, int] = {}
        for i in self.values:
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

    @property
    def columns(self) -> int:
        """Columns without those of rows of memory."""
        return len(self.low)

    def priced(self, prices: Iterable[float]) -> tuple[bytes, ...]:
        """The save set that is least at each price, in shares of all time per share of all bytes."""
        solver = self._solver(())
        found: list[bytes] = []
        for price in prices:
            cost = self._cost(price)
            count = len(self.low)
            solver.changeColsCost(count, np.arange(count, dtype=np.int32), cost)
            found += self._solve(solver, cost)[1]
        return tuple(dict.fromkeys(found))

    def within(
        self, budget: Fraction | int, steps: Iterable[Step], nodes: int = 0
    ) -> Relaxed | None:
        """The optimum with rows of memory at these steps; None where there is none.

        Args:
            budget: bytes.
            steps: where to have rows.
            nodes: nodes of branch and bound for whole decisions; 0 for the linear program alone.
        """
        rows = [self._row(step) for step in sorted(set(steps))]
        room = [float(Fraction(budget - row.constant) / self.byte_unit) for row in rows]
        if any(left < 0 for left in room):
            return None
        solver = self._solver(tuple(zip(rows, room, strict=True)))
        cost = np.zeros(solver.getNumCol())
        tilted = self._cost(0.0)
        cost[: len(tilted)] = tilted
        if nodes:
            count = len(self.low)
            whole = np.full(count, highspy.HighsVarType.kInteger)
            solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), whole)
            solver.setOptionValue("mip_rel_gap", _MIP_GAP if count > _TINY else 1e-6)
            solver.setOptionValue("mip_max_nodes", nodes)
        value, masks = self._solve(solver, cost, nodes > 0)
        if value is None:
            return None
        return Relaxed(max(0.0, value - _TILT) * self.time_unit, masks)

    def _cost(self, price: float) -> np.ndarray:
        ev, values = self.ev, self.ev.facts.values
        cost = np.zeros(len(self.low))
        count = len(self.values)
        for at, i in enumerate(self.values):
            again = self.r[i]
            if again is not None:
                cost[again] += values[i].time_s / self.time_unit
            if again == self.a[i]:
                continue
            own = sum(ev.sizes[s] for s in ev.held[i] if self.owner[s] == i)
            keep = (price + _TILT * (1 - at / count)) * (own / self.byte_unit)
            cost[self.a[i]] += keep
            if again is not None:
                cost[again] -= keep
        return cost

    def _kept(self, i: int, size: float, terms: dict[int, float]) -> float:
        """Add ``size * s_i`` to `terms`; the part of it that is constant comes back."""
        again = self.r[i]
        if again == self.a[i]:
            return 0.0
        if again is not None:
            terms[again] = terms.get(again, 0.0) - size
        if self.low[self.a[i]] == 1.0:
            return size
        terms[self.a[i]] = terms.get(self.a[i], 0.0) + size
        return 0.0

    def _row(self, step: Step) -> _Row:
        if step not in self._rows:
            side, at = step
            self._rows[step] = (
                self._forward_row(at) if side == "forward" else self._backward_row(at)
            )
        return self._rows[step]

    def _forward_row(self, at: int) -> _Row:
        ev = self.ev
        alive = (ev.forward_birth <= at) & (ev.forward_death >= at)
        constant = ev.base + int(ev.sizes[alive].sum())
        terms: dict[int, int] = {}
        for s, i in self.owner.items():
            if i <= at and not alive[s] and ev.sizes[s]:
                terms[i] = terms.get(i, 0) + int(ev.sizes[s])
        return _Row(constant, terms, {}, (), (), {})

    def _backward_row(self, at: int) -> _Row:
        ev = self.ev
        key = at * ev.stride + ev.stride - 1
        alive = (ev.birth <= key) & (ev.death >= key)
        for s, spans in self.intervals.items():
            if any(first <= at <= last for first, last in spans):
                alive[s] = True
        constant = ev.base + int(ev.sizes[alive].sum())
        terms: dict[int, int] = {}
        for s, i in self.owner.items():
            if self.hold[i] >= at and not alive[s] and ev.sizes[s]:
                terms[i] = terms.get(i, 0) + int(ev.sizes[s])
        # values read after this step that are computed again before it
        soon = sorted((ev.first[i], -i) for i in terms if at < ev.first[i] <= ev.end)
        pending = {-i: terms[-i] for _, i in soon[:_PENDING]}
        early = ev.earliest()
        follow: list[tuple[int, int, bool]] = []
        made: set[int] = set()
        lowest = min(pending, default=0)
        for i in reversed(self.values):
            if i < lowest:
                break
            if ev.always_saved(i) or early[i] > at:
                continue
            is_read = ev.first[i] <= at
            if not is_read and i not in made:
                continue
            for u in ev.parents[i]:
                if u >= lowest and ev.first[u] > at and not ev.always_saved(u):
                    made.add(u)
                    follow.append((i, u, is_read))
        chains = [
            (i, *chain)
            for i in self.values
            if ev.first[i] > ev.end and not (ev.never_saved(i) or ev.always_saved(i))
            if i not in terms and not any(alive[s] for s in ev.held[i])
            for chain in self._chains(i, at)
        ]
        sizes = {
            s: 0 if alive[s] else int(ev.sizes[s])
            for _, between, reader in chains
            for i in (*between, reader)
            for s in ev.held[i]
        }
        return _Row(constant, terms, pending, tuple(follow), tuple(chains), sizes)

    def _chains(self, start: int, at: int) -> list[tuple[tuple[int, ...], int]]:
        """Ways from a value that backward does not read down to values that it reads after `at`."""
        ev = self.ev
        found: list[tuple[tuple[int, ...], int]] = []
        own = set(ev.held[start])
        stack: list[tuple[int, tuple[int, ...]]] = [(start, ())]
        while stack and len(found) < _CHAINS:
            i, between = stack.pop()
            for reader in self.readers[i]:
                if own and own.issuperset(ev.held[reader]) and ev.held[reader]:
                    stack.append((reader, between))
                elif at < ev.first[reader] <= ev.end:
                    found.append((between, reader))
                elif ev.first[reader] > ev.end and len(between) < _LINKS:
                    stack.append((reader, (*between, reader)))
        return found

    def _solver(self, rows: Sequence[tuple[_Row, float]]) -> Any:
        program = _Program(self.low, self.pairs)
        for row, room in rows:
            terms: dict[int, float] = {}
            left = room
            for i, size in row.terms.items():
                left -= self._kept(i, size / self.byte_unit, terms)
            again: dict[int, int] = {}
            for _, i, _ in row.follow:
                if i not in again:
                    again[i] = program.column()
                    if i in row.pending:
                        terms[again[i]] = row.pending[i] / self.byte_unit
            for reader, i, is_read in row.follow:
                # y_i >= r_reader or y_reader, less s_i
                source = self.r[reader] if is_read else again[reader]
                assert source is not None
                bound: dict[int, float] = {source: 1.0}
                bound[again[i]] = bound.get(again[i], 0.0) - 1.0
                constant = self._kept(i, -1.0, bound)
                program.row(bound, -constant)
            self._held(program, row, terms, again)
            program.row(terms, left)
        return program.solver()

    def _held(
        self, program: _Program, row: _Row, terms: dict[int, float], again: dict[int, int]
    ) -> None:
        """Kept values that backward does not read itself: alive until what it reads is computed."""
        early: dict[int, int] = {}  # by storage: alive by then since computed again
        alive: dict[int, int] = {}

        def computed(i: int, bound: dict[int, float]) -> None:
            storages = self.ev.held[i]
            s = min(storages, default=-1)
            owner = self.owner.get(s, -1)
            if owner in row.pending:
                column = again.get(owner)
                if column is None:
                    column = again[owner] = program.column()
                    terms[column] = row.pending[owner] / self.byte_unit
            else:
                if s not in early:
                    early[s] = program.column()
                    terms[early[s]] = row.sizes.get(s, 0) / self.byte_unit
                column = early[s]
            bound[column] = -1.0

        for i, between, reader in row.chains:
            if i not in alive:
                alive[i] = program.column()
                terms[alive[i]] = self.ev.bytes_of(i) / self.byte_unit
            last, own = self.r[reader], self.r[i]
            assert last is not None and own is not None
            bound = {last: 1.0, alive[i]: -1.0}
            constant = 0.0
            bound[own] = bound.get(own, 0.0) - 1.0
            for link in between:
                constant += self._kept(link, -1.0, bound)
                computed(link, bound)
            computed(reader, bound)
            program.row(bound, -constant)

    def _solve(
        self, solver: Any, cost: np.ndarray, whole: bool = False
    ) -> tuple[float | None, tuple[bytes, ...]]:
        """A value that the optimum is not below, and save sets; None where nothing holds."""
        count = len(cost)
        solver.changeColsCost(count, np.arange(count, dtype=np.int32), cost)
        solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        match status:
            case highspy.HighsModelStatus.kOptimal | highspy.HighsModelStatus.kModelEmpty:
                pass  # without columns there is nothing to decide
            case highspy.HighsModelStatus.kSolutionLimit if whole:  # all nodes are used
                if info.primal_solution_status != 2:  # kSolutionStatusFeasible
                    return max(0.0, float(info.mip_dual_bound)), ()
            case (
                highspy.HighsModelStatus.kInfeasible
                | highspy.HighsModelStatus.kUnboundedOrInfeasible
            ):
                return None, ()  # columns are bounded: it cannot be unbounded
            case highspy.HighsModelStatus.kIterationLimit:
                return 0.0, ()  # nothing is known: times are not negative
            case _:
                raise SolverError(f"HiGHS stopped with status {status.name} and no usable bound")
        x = np.array(solver.getSolution().col_value)
        value = info.mip_dual_bound if whole else info.objective_function_value
        return float(value), self._cut(x)

    def _cut(self, x: np.ndarray) -> tuple[bytes, ...]:
        """Save sets of all thresholds that differ, at most eight."""
        count = len(self.low)
        inside = np.unique(np.round(x[:count][(x[:count] > 1e-6) & (x[:count] < 1 - 1e-6)], 6))
        cuts = [0.0, *inside.tolist(), 1.0]
        levels = [(low + high) / 2 for low, high in zip(cuts, cuts[1:], strict=False)]
        if len(levels) > 8:
            levels = [levels[k * (len(levels) - 1) // 7] for k in range(8)]
        ev = self.ev
        found = []
        for level in levels:
            kept = []
            for i in self.values:
                again = self.r[i]
                if again is None or again == self.a[i]:
                    continue
                if x[self.a[i]] > level >= x[again]:
                    kept.append(root_of(ev.facts, i))
            found.append(ev.mask(kept))
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of memory.

    Attributes:
        constant: bytes alive whatever is decided.
        terms: bytes by kept value.
        pending: bytes by value that also counts where it is computed again by then.
        follow: (reader, value, whether backward reads the reader by then): a reader computed again
            by then brings the value.
        chains: (value, readers between, reader): a value that backward does not read itself, and
            one that it reads after the step.
        sizes: bytes of the storages of all readers in `chains` that are not in `constant`.
    """

    constant: int
    terms: dict[int, int]
    pending: dict[int, int]
    follow: tuple[tuple[int, int, bool], ...]
    chains: tuple[tuple[int, tuple[int, ...], int], ...]
    sizes: dict[int, int]


class _Program:
    """Rows ``sum <= right`` over columns between a lower bound and one."""

    def __init__(self, low: Sequence[float], pairs: Sequence[tuple[int, int]]) -> None:
        self.low = list(low)
        self.index = [column for pair in pairs for column in pair]
        self.value = [1.0, -1.0] * len(pairs)
        self.start = list(range(0, 2 * len(pairs) + 1, 2))
        self.right = [0.0] * len(pairs)

    def column(self) -> int:
        self.low.append(0.0)
        return len(self.low) - 1

    def row(self, terms: dict[int, float], right: float) -> None:
        self.index += terms.keys()
        self.value += terms.values()
        self.start.append(len(self.index))
        self.right.append(right)

    def solver(self) -> Any:
        columns, rows = len(self.low), len(self.right)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = columns, rows
        lp.col_cost_ = np.zeros(columns)
        lp.col_lower_, lp.col_upper_ = np.array(self.low), np.ones(columns)
        lp.row_lower_, lp.row_upper_ = np.full(rows, -_INFINITY), np.array(self.right)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
        lp.a_matrix_.start_ = np.array(self.start, dtype=np.int32)
        lp.a_matrix_.index_ = np.array(self.index, dtype=np.int32)
        lp.a_matrix_.value_ = np.array(self.value, dtype=np.float64)
        solver = _SOLVER()
        for name, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            solver.setOptionValue(name, setting)
        solver.setOptionValue("simplex_iteration_limit", _ITERATIONS * (columns + rows) + 1000)
        solver.passModel(lp)
        return solver
