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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import highspy
import numpy as np

from ..errors import SolverError
from .columns import Columns
from .evaluate import Evaluator
from .hints import root_of
from .program import Writer, solver_of
from .rows import MemoryRow, Step, memory_row

_TILT = 1e-6  # of the time of all: what it costs to keep everything in the first rather than the last layer
_MIP_GAP = 0.002
_TINY = 500  # columns up to which branch and bound goes to the end, if its nodes allow


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
    """The program of one evaluator; rows of memory are made once for each step.

    Args:
        evaluator: outcomes of save sets.
        tied: values that are decided as another one is. With these the program is smaller, and its
            optimum no bound any more.
    """

    def __init__(self, evaluator: Evaluator, tied: Mapping[int, int] | None = None) -> None:
        self.ev = evaluator
        self.of = Columns(evaluator, tied or {})
        order = Writer(len(self.of.low))
        for less, more in self.of.pairs:
            order.row({less: 1.0, more: -1.0}, 0.0)
        self._order = order.part()
        self._parts = self._costs()
        self._rows: dict[Step, MemoryRow] = {}

    @property
    def columns(self) -> int:
        """Columns without those of rows of memory."""
        return len(self.of.low)

    def priced(self, prices: Iterable[float]) -> tuple[bytes, ...]:
        """The save set that is least at each price, in shares of all time per share of all bytes."""
        solver = solver_of(self.of.low, (self._order,))
        found: list[bytes] = []
        for price in prices:
            cost = self._cost(price)
            count = len(self.of.low)
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
        room = [float(Fraction(budget - row.constant) / self.of.byte_unit) for row in rows]
        if any(left < 0 for left in room):
            return None
        solver = solver_of(
            self.of.low,
            (self._order, *(r.within(left) for r, left in zip(rows, room, strict=True))),
        )
        cost = np.zeros(solver.getNumCol())
        tilted = self._cost(0.0)
        cost[: len(tilted)] = tilted
        if nodes:
            count = len(self.of.low)
            whole = np.full(count, highspy.HighsVarType.kInteger)
            solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), whole)
            solver.setOptionValue("mip_rel_gap", _MIP_GAP if count > _TINY else 1e-6)
            solver.setOptionValue("mip_max_nodes", nodes)
        value, masks = self._solve(solver, cost, nodes > 0)
        if value is None:
            return None
        return Relaxed(max(0.0, value - _TILT) * self.of.time_unit, masks)

    def _costs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By column: shares of time, of bytes, and of bytes weighed by how early they are kept."""
        ev, of = self.ev, self.of
        time, size, early = (np.zeros(len(of.low)) for _ in range(3))
        for at, i in enumerate(of.values):
            again = of.r[i]
            if again is not None:
                time[again] += ev.facts.values[i].time_s / of.time_unit
            if again == of.a[i]:
                continue
            own = sum(int(ev.sizes[s]) for s in ev.held[i] if of.owner[s] == i) / of.byte_unit
            for cost, keep in ((size, own), (early, own * (1 - at / len(of.values)))):
                cost[of.a[i]] += keep
                if again is not None:
                    cost[again] -= keep
        return time, size, early

    def _cost(self, price: float) -> np.ndarray:
        time, size, early = self._parts
        return np.asarray(time + price * size + _TILT * early)

    def _row(self, step: Step) -> MemoryRow:
        if step not in self._rows:
            self._rows[step] = memory_row(self.of, step)
        return self._rows[step]

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
        count = len(self.of.low)
        inside = np.unique(np.round(x[:count][(x[:count] > 1e-6) & (x[:count] < 1 - 1e-6)], 6))
        cuts = [0.0, *inside.tolist(), 1.0]
        levels = [(low + high) / 2 for low, high in zip(cuts, cuts[1:], strict=False)]
        if len(levels) > 8:
            levels = [levels[k * (len(levels) - 1) // 7] for k in range(8)]
        ev = self.ev
        found = []
        for level in levels:
            kept = []
            for i in self.of.values:
                again = self.of.r[i]
                if again is None or again == self.of.a[i]:
                    continue
                if x[self.of.a[i]] > level >= x[again]:
                    kept.append(root_of(ev.facts, i))
            found.append(ev.mask(kept))
        return tuple(dict.fromkeys(found))
