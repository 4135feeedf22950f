"""A lower bound on the cost of every choice, from the linear program of `formulation`.

Without the rule that x is integer the program is linear, and its dual gives each column j a reduced cost
d[j]: with L the optimum of the linear program,

    every choice costs at least   L + sum of max(0, d[j]) over its columns j

(weak duality). A choice with option o has the column x[g, o] and on each edge of g one move from what o
gives or to what it wants; one with a move has the columns y and z of the move and an option on each of
its ends. So one linear program gives a `Bound` for all options and moves, as `bound` does: tighter,
mainly where streams hide moves, and too slow for a large problem, so it comes second.

Weakness: degenerate duals are not unique, and another one may rule out more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import highspy
import numpy as np

from ..errors import SolverError
from .bound import Bound
from .formulation import VISIBLE, Problem
from .solve import MICRO, Array, Written, ends, solver_of, write

_SLACK = 1e-7  # of the bound, for the solver's tolerances


@dataclass(frozen=True, eq=False)
class Linear:
    """What the linear program says.

    Attributes:
        bound: what every choice costs at least.
        weights: per stream the share of its excess over computation that counts, as `relaxed` takes it.
    """

    bound: Bound
    weights: tuple[float, ...]


def linear_bound(problem: Problem, *, time_limit_s: float) -> Linear | None:
    """See the module's text; None where time ran out, an infinite bound where no choice is possible."""
    if any(not options for options in problem.options):
        return _nothing(problem)
    written = write(problem)
    solver = solver_of(written.program, time_limit_s, integers=False)
    solver.run()
    match solver.getModelStatus():
        case highspy.HighsModelStatus.kOptimal:
            pass
        case highspy.HighsModelStatus.kInfeasible | highspy.HighsModelStatus.kUnboundedOrInfeasible:
            return _nothing(problem)
        case highspy.HighsModelStatus.kTimeLimit | highspy.HighsModelStatus.kIterationLimit:
            return None
        case status:
            raise SolverError(f"HiGHS stopped with status {status.name} at the linear program")
    total = float(solver.getInfo().objective_function_value) / MICRO
    total -= _SLACK * abs(total)
    solution = solver.getSolution()
    excess = np.maximum(np.array(solution.col_dual), 0.0) / MICRO
    rows = np.array(solution.row_dual)
    weights = [float(np.clip(-rows[r[0]] / (1 - VISIBLE), 0.0, 1.0)) for r in written.beside]
    return Linear(_bound(problem, written, total, excess), tuple(weights))


def _nothing(problem: Problem) -> Linear:
    options = tuple(np.full(len(options), np.inf) for options in problem.options)
    moves = tuple(np.full(edge.seconds.shape, np.inf) for edge in problem.edges)
    return Linear(Bound(math.inf, options, moves), (1.0,) * len(problem.streams))


def _bound(problem: Problem, written: Written, total: float, excess: Array) -> Bound:
    options = [excess[columns] for columns in written.x]
    moves = [np.where(y >= 0, excess[y], np.inf) for y in written.y]
    shared = [np.zeros_like(m) for m in moves]  # what the move costs together with other readers
    for value, columns in written.z.items():
        for number in problem.values[value].edges:
            targets = {q: j for j, q in enumerate(problem.edges[number].targets)}
            for (i, q), column in columns.items():
                if q in targets:
                    shared[number][i, targets[q]] += excess[column]
    option_s, move_s = [total + o for o in options], []
    for edge, move, more in zip(problem.edges, moves, shared, strict=True):
        gives, wants = ends(problem, edge)
        left = _least(options[edge.producer], gives, len(edge.sources))
        right = _least(options[edge.consumer], wants, len(edge.targets))
        if edge.producer == edge.consumer:
            move_s.append(total + move + more)
            continue
        option_s[edge.producer] = option_s[edge.producer] + move.min(1)[gives]
        option_s[edge.consumer] = option_s[edge.consumer] + move.min(0)[wants]
        move_s.append(total + move + more + left[:, None] + right[None, :])
    return Bound(total, tuple(option_s), tuple(move_s))


def _least(costs: Array, keys: Array, count: int) -> Array:
    """Per key the least cost of an option that has it."""
    found = np.full(count, np.inf)
    np.minimum.at(found, keys, costs)
    return found
