"""The cheapest choice, by a bound that rules most options out and a solver for the few that are left.

1. Options that put the memory limit out of reach are dropped (`presolve.within_memory`).
2. What every choice with a given option, or a given move, costs at least comes from `bound`.
3. The solver gets the options and moves whose bound is at most a threshold: a choice with any other
   costs more than the threshold. So the best choice of all costs at least the smaller of the threshold
   and the solver's own lower bound, and the gap that is reported is the distance to that.
4. Where that leaves too large a gap, the threshold goes up to the cost of the choice found, above which
   nothing can be better, and the solver runs once more.

Small problems go to the solver as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from .bound import Bound, lower_bound
from .formulation import Problem, evaluate
from .presolve import restrict, within_memory
from .solve import solve

_SMALL = 8_000  # variables that the solver takes as they are
_ENOUGH = 30_000  # variables that the first threshold may leave
_LARGE = 400_000  # more variables than this are not handed to the solver a second time


def optimise(
    problem: Problem, *, time_limit_s: float = 60.0, gap: float = 0.001
) -> tuple[tuple[int, ...], float] | None:
    """The best choice of options and the gap reached; None where none is possible.

    Args:
        time_limit_s: of all calls of the solver together.
        gap: relative distance to the lower bound at which the search may stop.

    Raises:
        SolverError: the solver stopped without a choice and without a proof that there is none.
    """
    deadline = time.monotonic() + time_limit_s
    numbers = [np.flatnonzero(k) for k in within_memory(problem)]
    if any(len(n) == 0 for n in numbers):
        return None
    problem = restrict(problem, numbers)
    if problem.variables <= _SMALL:
        found = solve(problem, time_limit_s=time_limit_s, gap=gap)
        return None if found is None else (_among(numbers, found[0]), found[1])
    bound = lower_bound(problem)
    threshold = _first_threshold(bound, gap)
    best: tuple[float, tuple[int, ...], float] | None = None  # seconds, choice, gap
    while True:
        narrow, kept = _below(problem, bound, threshold)
        everything = narrow.variables == problem.variables
        left_s = max(1.0, deadline - time.monotonic())
        found = solve(narrow, time_limit_s=left_s, gap=gap)
        if found is not None:
            chosen = _among(kept, found[0])
            seconds = evaluate(problem, chosen)
            below = seconds * (1 - found[1])
            lowest = below if everything else min(threshold, below)
            reached = max(0.0, 1 - lowest / seconds) if seconds > 0 else 0.0
            if best is None or seconds <= best[0]:
                best = (seconds, chosen, reached)
            if reached <= gap:
                break
            raised = seconds * (1 - gap)  # a threshold that proves it good enough
        elif everything:
            return None
        else:
            raised = bound.total_s + 4 * (threshold - bound.total_s)
        wider = _below(problem, bound, raised)[0].variables
        late = best is not None and (time.monotonic() >= deadline or wider > _LARGE)
        if late or raised <= threshold:
            break
        threshold = raised
    assert best is not None
    return _among(numbers, best[1]), best[2]


def _among(numbers: Sequence[np.ndarray], chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n[i]) for n, i in zip(numbers, chosen, strict=True))


def _below(problem: Problem, bound: Bound, threshold: float) -> tuple[Problem, list[np.ndarray]]:
    """The problem with what may be part of a choice at or below `threshold`."""
    limit = threshold + 1e-9 * abs(threshold)  # the bound is a sum in floating point
    kept = [np.flatnonzero(s <= limit) for s in bound.option_s]
    return restrict(problem, kept, [s <= limit for s in bound.move_s]), kept


def _first_threshold(bound: Bound, gap: float) -> float:
    """As high as is good enough or leaves few variables, and always one option of each group."""
    levels = np.sort(np.concatenate([*bound.option_s, *(m.ravel() for m in bound.move_s)]))
    needed = max(float(s.min()) for s in bound.option_s)
    few = float(levels[min(_ENOUGH, len(levels)) - 1])
    return max(needed, min(few, bound.total_s * (1 + max(gap, 1e-6))))
