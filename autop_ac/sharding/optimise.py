"""The cheapest choice, by bounds that rule most options out and a solver for the few that are left.

1. Options that put the memory limit out of reach are dropped (`presolve.within_memory`).
2. What every choice with a given option, or a given move, costs at least comes from messages between
   groups (`bound`), with a guess of what is hidden. The solver gets the options and moves of the lowest
   bounds, and finds a first choice; the linear program of the same tells how much of what is hidden
   counts, and messages with that give a better bound.
3. Nothing with a bound above the cost of the choice found, less the gap, can be better by more than the
   gap. For what is below, the linear program gives bounds that are closer (`linear`), which leave few
   options: among the lowest of them the solver finds a better choice, and all that are below the cost of
   that are solved last.

The gap that is reached is the distance from the choice to the least cost that any other may have: the
solver's own lower bound, or the threshold above which things were ruled out. Small problems go to the
solver as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .bound import Bound, highest, lower_bound
from .formulation import Problem, evaluate
from .linear import Linear, linear_bound
from .presolve import restrict, within_memory
from .solve import OutOfTimeError, solve

_SMALL = 8_000  # variables that the solver takes as they are
_FIRST = 10_000  # variables among which a first choice is looked for
_LARGE = 400_000  # more variables than this are not handed to the solver for a proof
_ROUGH_ROUNDS = 10  # of messages before weights are known

Numbers = Sequence[np.ndarray]  # per group those of its options that are kept


@dataclass(frozen=True)
class _Found:
    """A choice, what it costs and what every choice costs at least."""

    chosen: tuple[int, ...]
    seconds: float
    lowest_s: float


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
    best = _by_bounds(problem, gap, deadline)
    if best is None:
        return None
    reached = 1 - best.lowest_s / best.seconds if best.seconds > 0 else 0.0
    return _among(numbers, best.chosen), max(0.0, reached)


def _by_bounds(problem: Problem, gap: float, deadline: float) -> _Found | None:
    bound = lower_bound(problem, rounds=_ROUGH_ROUNDS)
    few, threshold = _FIRST, bound.total_s * (1 + max(gap, 1e-6))
    threshold = max(_needed(bound), min(threshold, _level(bound, few)))
    while True:  # up to the first choice
        part = _part(problem, bound, threshold, deadline)
        best = _quick(problem, part, gap, deadline)
        if best is None:
            best = _solved(problem, part, math.inf, gap, deadline)
        if best is not None:
            break
        if math.isinf(part.limit):
            return None
        few = 2 * few
        threshold = max(bound.total_s + 4 * (threshold - bound.total_s), _level(bound, few))
    weights = part.linear.weights if part.linear is not None else None
    bound = highest(bound, lower_bound(problem, weights))
    best = replace(best, lowest_s=max(best.lowest_s, bound.total_s))
    return best if _is_near(best, gap) else _improved(problem, bound, best, gap, deadline)


def _improved(problem: Problem, bound: Bound, best: _Found, gap: float, deadline: float) -> _Found:
    """A choice better by more than the gap, or the proof that there is none, as far as time allows."""
    if _below(problem, bound, best.seconds * (1 - gap))[0].variables > _LARGE:
        return best
    try:
        part = _part(problem, bound, best.seconds * (1 - gap), deadline)
        best = _better(best, _quick(problem, part, gap, deadline))
        limit = best.seconds * (1 - gap)
        found = _solved(problem, part, limit, gap, deadline)
        if found is None:
            return replace(best, lowest_s=max(best.lowest_s, limit))
        return _better(best, found)
    except OutOfTimeError:
        return best  # with the gap that is proved


@dataclass(frozen=True)
class _Part:
    """The problem with the options `kept` alone: all with which a choice may cost at most `limit`."""

    problem: Problem
    kept: Numbers
    limit: float
    linear: Linear | None  # None where time ran out


def _part(problem: Problem, bound: Bound, limit: float, deadline: float) -> _Part:
    narrow, kept = _below(problem, bound, limit)
    if narrow.variables == problem.variables:
        limit = math.inf
    return _Part(narrow, kept, limit, linear_bound(narrow, time_limit_s=_left_s(deadline)))


def _quick(problem: Problem, part: _Part, gap: float, deadline: float) -> _Found | None:
    """The best choice among the few options of the lowest linear bounds; None where there is none."""
    if part.linear is None:
        return None
    found = _solved(problem, part, _needed(part.linear.bound), gap, deadline)
    if found is None:
        return None
    lowest_s = min(part.limit, part.linear.bound.total_s)
    return replace(found, lowest_s=max(found.lowest_s, lowest_s))


def _solved(
    problem: Problem, part: _Part, limit: float, gap: float, deadline: float
) -> _Found | None:
    """The best choice of a part without what its linear bound puts above `limit`; None for none."""
    narrow, kept = part.problem, part.kept
    if part.linear is not None:
        if math.isinf(part.linear.bound.total_s):
            return None
        narrow, among = _below(narrow, part.linear.bound, limit)
        kept = [n[k] for n, k in zip(kept, among, strict=True)]
    found = solve(narrow, time_limit_s=_left_s(deadline), gap=gap)
    if found is None:
        return None
    chosen = _among(kept, found[0])
    seconds = evaluate(problem, chosen)
    return _Found(chosen, seconds, min(limit, part.limit, seconds * (1 - found[1])))


def _better(one: _Found, other: _Found | None) -> _Found:
    if other is None:
        return one
    cheaper = min(one, other, key=lambda found: found.seconds)
    return replace(cheaper, lowest_s=max(one.lowest_s, other.lowest_s))


def _is_near(found: _Found, gap: float) -> bool:
    return found.lowest_s >= found.seconds * (1 - gap)


def _left_s(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _among(numbers: Numbers, chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n[i]) for n, i in zip(numbers, chosen, strict=True))


def _below(problem: Problem, bound: Bound, threshold: float) -> tuple[Problem, list[np.ndarray]]:
    """The problem with what may be part of a choice at or below `threshold`."""
    limit = threshold + 1e-9 * abs(threshold)  # the bound is a sum in floating point
    kept = [np.flatnonzero(s <= limit) for s in bound.option_s]
    return restrict(problem, kept, [s <= limit for s in bound.move_s]), kept


def _needed(bound: Bound) -> float:
    """The least threshold that leaves an option to each group."""
    return max(float(s.min()) for s in bound.option_s)


def _level(bound: Bound, few: int) -> float:
    """A threshold that leaves about `few` options and moves."""
    levels = np.sort(np.concatenate([*bound.option_s, *(m.ravel() for m in bound.move_s)]))
    levels = levels[np.isfinite(levels)]
    return float(levels[min(few, len(levels)) - 1])
