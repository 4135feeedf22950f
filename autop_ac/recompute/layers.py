"""Layers that are equal, so that they can be decided alike.

A layer is a run of forward values whose module path agrees up to its first number. Two are equal where
their values agree one by one in operator, bytes, time and shape, and in which values of the layer each
reads. Linear in values and edges.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..capture.names import block_of_path
from ..graph.facts import Facts, Value
from .hints import root_of


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its module path, its values' range, and their positions among the free ones."""

    name: str
    start: int
    end: int
    slots: tuple[int, ...]


def equal_layers(facts: Facts, free: Sequence[int]) -> tuple[tuple[Layer, ...], ...]:
    """Classes of at least two equal layers, in graph order.

    Args:
        facts: the local graph.
        free: values to decide, ascending.
    """
    classes: dict[tuple, list[Layer]] = defaultdict(list)
    for layer, run in groupby(facts.forward, key=lambda v: block_of_path(v.module)):
        values = list(run)
        start, end = values[0].index, values[-1].index + 1
        slots = range(bisect.bisect_left(free, start), bisect.bisect_left(free, end))
        if layer and slots:
            shape = tuple(free[k] - start for k in slots)
            classes[(shape, *(_signature(v, start) for v in values))].append(
                Layer(layer, start, end, tuple(slots))
            )
    return tuple(tuple(layers) for layers in classes.values() if len(layers) > 1)


def tied_values(classes: Iterable[Sequence[Layer]], runs: int) -> dict[int, int]:
    """Values of neighbouring equal layers as one: each value to the one that stands for it.

    The first and the last layer stay by themselves, what is between falls into `runs` runs.
    """
    stands_for: dict[int, int] = {}
    for layers in classes:
        names = list(dict.fromkeys(layer.name for layer in layers))
        middle = max(1, len(names) - 2)
        run = {n: (k - 1) * runs // middle for k, n in enumerate(names)}
        run[names[0]], run[names[-1]] = -1, runs
        first: dict[tuple[int, int], int] = {}
        seen: Counter[str] = Counter()
        for layer in layers:
            start = first.setdefault((run[layer.name], seen[layer.name]), layer.start)
            seen[layer.name] += 1
            for i in range(layer.start, layer.end):
                stands_for[i] = start + i - layer.start
    return stands_for


def borders(facts: Facts, free: Sequence[int], every: int) -> frozenset[int]:
    """Free values that a later group of `every` layers reads: what checkpointing each group keeps."""
    group: dict[int, int] = {}
    names = [layer for layer, _ in groupby(block_of_path(v.module) for v in facts.forward)]
    at, number = 0, 0
    for layer, run in groupby(facts.forward, key=lambda v: block_of_path(v.module)):
        for value in run:
            group[value.index] = number
        at += 1
        ends = at == len(names) or not layer or not names[at]
        number += ends or at % every == 0
    candidates = set(free)
    return frozenset(
        root
        for value in facts.forward
        for i in value.inputs
        if i in group and group[i] < group[value.index]
        for root in (root_of(facts, i),)
        if root in candidates
    )


def _signature(value: Value, start: int) -> tuple:
    # what stands before the layer is no part of it
    inside = tuple(i - start for i in value.inputs if i >= start)
    follows = (
        value.follows - start if value.follows is not None and value.follows >= start else None
    )
    return (value.op, value.bytes, value.time_s, value.shape, value.side, inside, follows)
