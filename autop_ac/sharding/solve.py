"""The program of `formulation`, written down for HiGHS and solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from ..errors import SolverError
from .formulation import VISIBLE, Edge, Problem, Value
from .option import given, wanted, whole
from .plan import Placements

MICRO = 1e6  # the solver's tolerances suit microseconds
_INFINITY = highspy.kHighsInf
_SOLVER: Any = highspy.Highs.__base__  # the class on top of it prints a banner when it is made
Array = np.ndarray


class OutOfTimeError(SolverError):
    """The solver stopped at its limit without a choice and without a proof that there is none."""


class Program:
    """Columns and rows as they are added, all at once where there are many."""

    def __init__(self) -> None:
        self.costs: list[Array] = []
        self.upper: list[Array] = []
        self.columns = 0
        self.integers = 0  # the first columns are integer
        self.low: list[Array] = []
        self.high: list[Array] = []
        self.rows = 0
        self.entries: list[tuple[Array, Array, Array]] = []  # rows, columns, values

    def add_columns(self, costs: Array, upper: float = 1.0) -> Array:
        """Numbers of new columns in [0, upper]."""
        self.costs.append(np.asarray(costs, dtype=float))
        self.upper.append(np.full(len(costs), upper))
        self.columns += len(costs)
        return np.arange(self.columns - len(costs), self.columns)

    def add_rows(self, count: int, low: float, high: float) -> Array:
        """Numbers of new rows, still empty."""
        self.low.append(np.full(count, low))
        self.high.append(np.full(count, high))
        self.rows += count
        return np.arange(self.rows - count, self.rows)

    def set(self, rows: Array, columns: Array, value: float | Array) -> None:
        """Entries of the matrix."""
        values = np.broadcast_to(np.asarray(value, dtype=float), np.shape(columns))
        self.entries.append((np.broadcast_to(rows, np.shape(columns)), columns, values))

    def matrix(self) -> tuple[Array, Array, Array]:
        """Starts, columns and values, row by row."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self.entries, strict=True))
        order = np.argsort(rows, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=self.rows))])
        return starts.astype(np.int32), columns[order].astype(np.int32), values[order]


@dataclass(frozen=True, eq=False)
class Written:
    """The program of a problem.

    Attributes:
        program: columns and rows.
        x: per group the columns of its options.
        y: per edge the column of each [source, target], -1 where the move is forbidden.
        z: per value with several readers (by its number) the column of each (source, target).
        beside: per stream its row.
    """

    program: Program
    x: list[Array]
    y: list[Array]
    z: dict[int, dict[tuple[int, Placements], int]]
    beside: list[Array]


def write(problem: Problem) -> Written:
    """The program of `formulation`; each group has options."""
    program = Program()
    x = _choose_one(program, problem)
    beside = _streams(program, problem, x)
    y = _flows(program, problem, x, beside)
    z = _moves(program, problem, y, beside)
    _ties(program, problem, x)
    _limits(program, problem, x)
    return Written(program, x, y, z, beside)


def solve(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.001
) -> tuple[tuple[int, ...], float] | None:
    """The best choice of options and the gap reached; None where none is possible.

    Raises:
        SolverError: the solver stopped without a choice and without a proof that there is none.
    """
    if any(not options for options in problem.options):
        return None
    written = write(problem)
    found = _run(written.program, time_limit_s, gap)
    if found is None:
        return None
    values, reached = found
    chosen = []
    for name, columns in zip(problem.names, written.x, strict=True):
        ones = np.flatnonzero(np.round(values[columns]) == 1)
        if len(ones) != 1:
            raise SolverError(f"the solver gave {len(ones)} options for {name} where one is needed")
        chosen.append(int(ones[0]))
    return tuple(chosen), reached


def _choose_one(program: Program, problem: Problem) -> list[Array]:
    x = []
    for seconds, count in zip(problem.option_s, problem.counts, strict=True):
        columns = program.add_columns(np.array(seconds) * (count * MICRO))
        program.set(program.add_rows(1, 1.0, 1.0), columns, 1.0)
        x.append(columns)
    program.integers = program.columns
    return x


def _streams(program: Program, problem: Problem, x: list[Array]) -> list[Array]:
    """Rows of the streams, to which moves are still to be added; none where nothing is hidden."""
    rows = []
    for stream in problem.streams:
        row = program.add_rows(1, -_INFINITY, 0.0)
        rest = program.add_columns(np.array([1 - VISIBLE]), _INFINITY)
        program.set(row, rest, -1.0)
        for group, count in stream.computing:
            computing = np.array([o.compute_s for o in problem.options[group]])
            program.set(row, x[group], -computing * (count * MICRO))
        rows.append(row)
    return rows


def _share(value: Value, beside: list[Array]) -> float:
    """What a move of the value counts in the sum of all."""
    hidden = value.stream >= 0 and beside
    return value.count * value.weight * (VISIBLE if hidden else 1.0)


def _flows(program: Program, problem: Problem, x: list[Array], beside: list[Array]) -> list[Array]:
    """Columns by [source, target] of each edge, -1 where the move is forbidden."""
    alone: dict[int, list[Value]] = {}  # values of which the edge is the only reader
    for value in problem.values:
        if len(value.edges) == 1:
            alone.setdefault(value.edges[0], []).append(value)
    y = []
    for number, edge in enumerate(problem.edges):
        p, q = np.nonzero(np.isfinite(edge.seconds))
        values = alone.get(number, [])
        share = sum(_share(value, beside) for value in values)
        columns = program.add_columns(edge.seconds[p, q] * (share * MICRO))
        _run_beside(program, values, beside, columns, edge.seconds[p, q])
        gives, wants = ends(problem, edge)
        leaving = program.add_rows(len(edge.sources), 0.0, 0.0)
        arriving = program.add_rows(len(edge.targets), 0.0, 0.0)
        program.set(leaving[p], columns, 1.0)
        program.set(leaving[gives], x[edge.producer], -1.0)
        program.set(arriving[q], columns, 1.0)
        program.set(arriving[wants], x[edge.consumer], -1.0)
        numbers = np.full(edge.seconds.shape, -1)
        numbers[p, q] = columns
        y.append(numbers)
    return y


def ends(problem: Problem, edge: Edge) -> tuple[Array, Array]:
    """Per option of the producer the number of its source, per option of the consumer its target."""
    sources = {p: i for i, p in enumerate(edge.sources)}
    targets = {q: i for i, q in enumerate(edge.targets)}
    gives = [sources[given(o, edge.output)] for o in problem.options[edge.producer]]
    wants = [targets[wanted(o, edge.slot)] for o in problem.options[edge.consumer]]
    return np.array(gives, dtype=int), np.array(wants, dtype=int)


def _run_beside(
    program: Program, values: list[Value], beside: list[Array], columns: Array, seconds: Array
) -> None:
    """Moves of hidden values in the rows of their streams."""
    for stream, row in enumerate(beside):
        count = sum(v.count * v.weight for v in values if v.stream == stream)
        if count and len(columns):
            program.set(row, columns, seconds * (count * MICRO))


def _moves(
    program: Program, problem: Problem, y: list[Array], beside: list[Array]
) -> dict[int, dict[tuple[int, Placements], int]]:
    """Moves of values with several readers, which pay once for each target."""
    found = {}
    for at, value in enumerate(problem.values):
        if len(value.edges) == 1:
            continue
        by_move: dict[tuple[int, Placements], list[int]] = {}
        price: dict[tuple[int, Placements], float] = {}
        for number in value.edges:
            edge = problem.edges[number]
            for i, j in zip(*np.nonzero(np.isfinite(edge.seconds)), strict=True):
                if edge.seconds[i, j] > 0:
                    key = (int(i), edge.targets[j])
                    by_move.setdefault(key, []).append(int(y[number][i, j]))
                    price[key] = float(edge.seconds[i, j])
        prices = np.array(list(price.values()))
        z = program.add_columns(prices * (_share(value, beside) * MICRO))
        _run_beside(program, [value], beside, z, prices)
        pairs = [(c, m) for c, moves in zip(z, by_move.values(), strict=True) for m in moves]
        if pairs:
            rows = program.add_rows(len(pairs), 0.0, _INFINITY)
            shared, single = np.array(pairs).T
            program.set(rows, shared, 1.0)
            program.set(rows, single, -1.0)
        found[at] = dict(zip(by_move, map(int, z), strict=True))
    return found


def _ties(program: Program, problem: Problem, x: list[Array]) -> None:
    for a, b in problem.ties:
        left = [given(o, 0) for o in problem.options[a]]
        right = [whole(wanted(o, 0)) for o in problem.options[b]]
        keys = {key: i for i, key in enumerate(dict.fromkeys([*left, *right]))}
        rows = program.add_rows(len(keys), 0.0, 0.0)
        program.set(rows[[keys[k] for k in left]], x[a], 1.0)
        program.set(rows[[keys[k] for k in right]], x[b], -1.0)


def _limits(program: Program, problem: Problem, x: list[Array]) -> None:
    for limit in problem.limits:
        if not limit.sizes or (limit.low is None and limit.high is None):
            continue
        unit = max(max(sizes) for _, sizes in limit.sizes) or 1
        row = program.add_rows(
            1,
            -_INFINITY if limit.low is None else limit.low / unit,
            _INFINITY if limit.high is None else limit.high / unit,
        )
        for group, sizes in limit.sizes:
            program.set(row, x[group], np.array(sizes) / unit)


def solver_of(program: Program, time_limit_s: float, *, integers: bool, gap: float = 0.0) -> Any:
    """HiGHS with the program in it; as a linear program where no column need be integer."""
    columns, rows = program.columns, program.rows
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = np.concatenate(program.costs)
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), np.concatenate(program.upper)
    lp.row_lower_, lp.row_upper_ = np.concatenate(program.low), np.concatenate(program.high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = program.matrix()
    if integers:
        kinds = [highspy.HighsVarType.kContinuous] * columns
        kinds[: program.integers] = [highspy.HighsVarType.kInteger] * program.integers
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
    return solver


def _run(program: Program, time_limit_s: float, gap: float) -> tuple[Array, float] | None:
    solver = solver_of(program, time_limit_s, integers=True, gap=gap)
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
            raise OutOfTimeError(
                f"the search stopped after {time_limit_s} s without a plan ({status.name}, "
                f"{program.columns} variables): allow more time, or fix more placements"
            )
        case _:
            raise SolverError(f"HiGHS stopped with status {status.name} and no usable plan")
