"""The program of `formulation`, written down for HiGHS and solved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from ..errors import SolverError
from .formulation import Problem
from .option import given, wanted, whole
from .plan import Placements

_MICRO = 1e6  # the solver's tolerances suit microseconds
_INFINITY = highspy.kHighsInf
_SOLVER: Any = highspy.Highs.__base__  # the class on top of it prints a banner when it is made


class _Program:
    """Columns and rows as they are added."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.start: list[int] = [0]
        self.index: list[int] = []
        self.value: list[float] = []

    def column(self, cost: float, *, integer: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(1.0)
        if integer:
            self.integer.append(len(self.cost) - 1)
        return len(self.cost) - 1

    def row(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> None:
        self.weighted([(c, 1.0) for c in plus] + [(c, -1.0) for c in minus], low, high)

    def weighted(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.index.extend(c for c, _ in terms)
        self.value.extend(w for _, w in terms)
        self.start.append(len(self.index))
        self.low.append(low)
        self.high.append(high)


def solve(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.001
) -> tuple[tuple[int, ...], float] | None:
    """The best choice of options and the gap reached; None where none is possible.

    Raises:
        SolverError: the solver stopped without a choice and without a proof that there is none.
    """
    if any(not options for options in problem.options):
        return None
    program = _Program()
    x = _choose_one(program, problem)
    _edges(program, problem, x)
    _ties(program, problem, x)
    _memory(program, problem, x)
    found = _run(program, time_limit_s, gap)
    if found is None:
        return None
    values, reached = found
    chosen = []
    for name, columns in zip(problem.names, x, strict=True):
        ones = [i for i, c in enumerate(columns) if round(values[c]) == 1]
        if len(ones) != 1:
            raise SolverError(f"the solver gave {len(ones)} options for {name} where one is needed")
        chosen.append(ones[0])
    return tuple(chosen), reached


def _choose_one(program: _Program, problem: Problem) -> list[list[int]]:
    x = []
    for seconds in problem.option_s:
        columns = [program.column(s * _MICRO, integer=True) for s in seconds]
        program.row(columns, [], 1.0, 1.0)
        x.append(columns)
    return x


def _edges(program: _Program, problem: Problem, x: list[list[int]]) -> None:
    readers: dict[int, int] = defaultdict(int)
    for edge in problem.edges:
        readers[edge.value] += 1
    shared: dict[tuple[int, Placements, Placements], int] = {}
    for edge in problem.edges:
        sources: dict[Placements, list[int]] = defaultdict(list)
        targets: dict[Placements, list[int]] = defaultdict(list)
        for column, option in zip(x[edge.producer], problem.options[edge.producer], strict=True):
            sources[given(option, edge.output)].append(column)
        for column, option in zip(x[edge.consumer], problem.options[edge.consumer], strict=True):
            targets[wanted(option, edge.slot)].append(column)
        leaving: dict[Placements, list[int]] = {p: [] for p in sources}
        arriving: dict[Placements, list[int]] = {q: [] for q in targets}
        for (p, q), seconds in edge.seconds.items():
            if p not in sources or q not in targets:
                continue
            alone = readers[edge.value] == 1
            y = program.column(seconds * _MICRO if alone else 0.0)
            leaving[p].append(y)
            arriving[q].append(y)
            if seconds > 0 and not alone:
                key = (edge.value, p, q)
                if key not in shared:
                    shared[key] = program.column(seconds * _MICRO)
                program.row([shared[key]], [y], 0.0, _INFINITY)
        for p, columns in sources.items():
            program.row(leaving[p], columns, 0.0, 0.0)
        for q, columns in targets.items():
            program.row(arriving[q], columns, 0.0, 0.0)


def _ties(program: _Program, problem: Problem, x: list[list[int]]) -> None:
    for a, b in problem.ties:
        left: dict[Placements, list[int]] = defaultdict(list)
        right: dict[Placements, list[int]] = defaultdict(list)
        for column, option in zip(x[a], problem.options[a], strict=True):
            left[given(option, 0)].append(column)
        for column, option in zip(x[b], problem.options[b], strict=True):
            right[whole(wanted(option, 0))].append(column)
        for key in dict.fromkeys([*left, *right]):
            program.row(left.get(key, []), right.get(key, []), 0.0, 0.0)


def _memory(program: _Program, problem: Problem, x: list[list[int]]) -> None:
    low, high = problem.memory_low, problem.memory_high
    if not problem.memory or (low is None and high is None):
        return
    unit = max(max(sizes) for _, sizes in problem.memory) or 1
    terms = [
        (column, size / unit)
        for group, sizes in problem.memory
        for column, size in zip(x[group], sizes, strict=True)
    ]
    program.weighted(
        terms,
        -_INFINITY if low is None else low / unit,
        _INFINITY if high is None else high / unit,
    )


def _run(program: _Program, time_limit_s: float, gap: float) -> tuple[np.ndarray, float] | None:
    columns, rows = len(program.cost), len(program.low)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.array(program.upper)
    lp.row_lower_, lp.row_upper_ = np.array(program.low), np.array(program.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
    lp.a_matrix_.start_ = np.array(program.start, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.index, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.value)
    kinds = [highspy.HighsVarType.kContinuous] * columns
    for column in program.integer:
        kinds[column] = highspy.HighsVarType.kInteger
    lp.integrality_ = kinds
    solver = _SOLVER()
    for name, setting in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("time_limit", float(time_limit_s)),
        ("mip_rel_gap", float(gap)),
    ):
        solver.setOptionValue(name, setting)
    solver.passModel(lp)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    feasible = info.primal_solution_status == 2  # kSolutionStatusFeasible
    match status:
        case highspy.HighsModelStatus.kOptimal:
            return np.array(solver.getSolution().col_value), max(0.0, float(info.mip_gap))
        case highspy.HighsModelStatus.kInfeasible | highspy.HighsModelStatus.kUnboundedOrInfeasible:
            return None  # costs are not negative and columns bounded: it cannot be unbounded
        case (
            highspy.HighsModelStatus.kTimeLimit
            | highspy.HighsModelStatus.kIterationLimit
            | highspy.HighsModelStatus.kSolutionLimit
            | highspy.HighsModelStatus.kInterrupt
        ):
            if feasible:
                return np.array(solver.getSolution().col_value), float(info.mip_gap)
            raise SolverError(
                f"the search stopped after {time_limit_s} s without a plan ({status.name}, "
                f"{columns} variables): allow more time, or fix more placements"
            )
        case _:
            raise SolverError(f"HiGHS stopped with status {status.name} and no usable plan")
