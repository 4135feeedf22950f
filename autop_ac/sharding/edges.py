"""Reads of values by groups, each with the prices of the moves it may make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..capture.joint import JointGraph
from .chains import gathered_twice, reduced_late
from .costs import RedistributionCosts
from .fold import is_tensor_node
from .formulation import Edge, Value
from .groups import Draft, Settings, source_of
from .option import given, leaves_of, outputs_of, wanted


@dataclass(frozen=True)
class _Read:
    """What makes reads equal: both ends, and what the prices depend on."""

    producer: int
    output: int
    consumer: int
    slot: int
    twice: bool
    late: bool


def collect_edges(
    joint: JointGraph,
    draft: Draft,
    results: Sequence[tuple[int, int] | None],
    settings: Settings,
) -> tuple[tuple[Edge, ...], tuple[Value, ...]]:
    """The edges and values of a graph, equal ones put together."""
    twice = gathered_twice(joint) if settings.reshard_after_forward else set()
    late = reduced_late(joint, settings.reduce_dtype)
    first: dict[_Read, tuple[torch.fx.Node, torch.fx.Node | None]] = {}
    readers: dict[tuple[str, int], dict[_Read, None]] = defaultdict(dict)

    def add(leaf: torch.fx.Node, reader: torch.fx.Node | None, consumer: int, slot: int) -> None:
        source = source_of(draft, leaf)
        if source is None:
            return
        read = _Read(*source, consumer, slot, leaf in twice, (leaf, reader) in late)
        first.setdefault(read, (leaf, reader))
        name = (
            leaf.name if is_tensor_node(leaf) or leaf.op != "call_function" else leaf.args[0].name
        )
        readers[name, source[1]][read] = None

    for node in joint.module.graph.nodes:
        if is_tensor_node(node):
            group = draft.group_of[node.name]
            for slot, leaf in enumerate(leaves_of(node)):
                add(leaf, node, group, slot)
    for where, result in zip(results, joint.module.graph.output_node().args[0], strict=True):
        if where is not None:
            add(result, None, *where)
    numbers = {read: i for i, read in enumerate(first)}
    alike = Counter(tuple(sorted(numbers[r] for r in reads)) for reads in readers.values())
    prices = RedistributionCosts(
        settings.shape,
        settings.topology,
        settings.device.memory_bandwidth,
        exchange=settings.device.name != "cpu",  # gloo has no all-to-all
    )
    edges = tuple(_edge(draft, read, *nodes, prices) for read, nodes in first.items())
    return edges, tuple(Value(numbered, count) for numbered, count in alike.items())


def _edge(
    draft: Draft,
    read: _Read,
    leaf: torch.fx.Node,
    reader: torch.fx.Node | None,
    prices: RedistributionCosts,
) -> Edge:
    """Prices of the moves that an edge may make.

    On two axes and more, a value is moved in front of a one-input operator only where the operator
    cannot take it as it is: moving its result costs the same and leaves fewer variables.
    """
    value = leaf.meta["val"]
    sources = tuple(dict.fromkeys(given(o, read.output) for o in draft.options[read.producer]))
    targets = tuple(dict.fromkeys(wanted(o, read.slot) for o in draft.options[read.consumer]))
    seconds = prices.matrix(value, sources, targets) * (2.0 if read.twice else 1.0)
    several_axes = len(prices.mesh_shape) > 1
    follow = several_axes and reader is not None and _follows(reader, value)
    if follow:
        column = {q: j for j, q in enumerate(targets)}
        stays = np.array([column.get(p, -1) for p in sources])
        moves = np.arange(len(targets))[None, :] != stays[:, None]
        seconds[moves & (stays >= 0)[:, None]] = np.inf
    if read.late:
        seconds[prices.ends_partial(sources, targets)] = np.inf
    return Edge(read.producer, read.output, read.consumer, read.slot, sources, targets, seconds)


def _follows(node: torch.fx.Node, value: torch.Tensor) -> bool:
    outputs = [v for v in outputs_of(node) if v is not None]
    out_bytes = sum(v.numel() * v.element_size() for v in outputs)
    return len(leaves_of(node)) == 1 and out_bytes <= value.numel() * value.element_size()
