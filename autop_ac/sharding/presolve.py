"""Options and moves that no plan needs, taken out before the solver sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .formulation import Edge, Problem
from .option import given, wanted


def within_memory(problem: Problem) -> list[np.ndarray]:
    """Per group which options leave the memory limit within reach of all others."""
    kept = [np.ones(len(options), dtype=bool) for options in problem.options]
    for limit in problem.limits:
        low, high = limit.low, limit.high
        least = sum(min(sizes) for _, sizes in limit.sizes)
        most = sum(max(sizes) for _, sizes in limit.sizes)
        for group, sizes in limit.sizes:
            bytes_ = np.array(sizes, dtype=float)
            if high is not None:
                kept[group] &= least - bytes_.min() + bytes_ <= high + 0.5
            if low is not None:
                kept[group] &= most - bytes_.max() + bytes_ >= low - 0.5
    return kept


def restrict(
    problem: Problem,
    kept: Sequence[np.ndarray],
    moves: Sequence[np.ndarray] | None = None,
) -> Problem:
    """The problem with the options of the numbers `kept` alone, and the kept moves by [source, target] of each edge."""
    options = tuple(
        tuple(options[i] for i in chosen)
        for options, chosen in zip(problem.options, kept, strict=True)
    )
    seconds = tuple(
        tuple(s[i] for i in chosen) for s, chosen in zip(problem.option_s, kept, strict=True)
    )
    limits = tuple(
        replace(limit, sizes=tuple((g, tuple(s[i] for i in kept[g])) for g, s in limit.sizes))
        for limit in problem.limits
    )
    narrower = replace(problem, options=options, option_s=seconds, limits=limits)
    edges = tuple(
        _narrow(narrower, edge, None if moves is None else moves[i])
        for i, edge in enumerate(problem.edges)
    )
    return replace(narrower, edges=edges)


def _narrow(problem: Problem, edge: Edge, moves: np.ndarray | None) -> Edge:
    """The edge without placements that no kept option has."""
    gives = {given(o, edge.output) for o in problem.options[edge.producer]}
    wants = {wanted(o, edge.slot) for o in problem.options[edge.consumer]}
    rows = [i for i, p in enumerate(edge.sources) if p in gives]
    columns = [j for j, q in enumerate(edge.targets) if q in wants]
    seconds = edge.seconds if moves is None else np.where(moves, edge.seconds, np.inf)
    return replace(
        edge,
        sources=tuple(edge.sources[i] for i in rows),
        targets=tuple(edge.targets[j] for j in columns),
        seconds=seconds[np.ix_(rows, columns)],
    )
