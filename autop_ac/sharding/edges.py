"""Reads of values by groups, each with the prices of the moves it may make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..capture.joint import JointGraph
from ..capture.names import block_of_path
from .chains import BACKWARD, FORWARD, ParameterChains, is_backward, reduced_late
from .costs import RedistributionCosts
from .fold import is_tensor_node, places_of
from .formulation import Edge, Stream, Value
from .groups import Draft, Settings, source_of
from .option import given, leaves_of, outputs_of, producer_of, wanted

_Beside = tuple[int, str] | None  # side and layer whose computation hides a move


@dataclass(frozen=True)
class _Read:
    """What makes reads equal: both ends, and what the prices depend on."""

    producer: int
    output: int
    consumer: int
    slot: int
    late: bool


def collect_edges(
    joint: JointGraph,
    draft: Draft,
    results: Sequence[tuple[int, int] | None],
    settings: Settings,
) -> tuple[tuple[Edge, ...], tuple[Value, ...], tuple[Stream, ...]]:
    """The edges, values and streams of a graph, equal ones put together."""
    chains = ParameterChains(joint)
    late = reduced_late(joint, settings.reduce_dtype)
    first: dict[_Read, tuple[torch.fx.Node, torch.fx.Node | None]] = {}
    readers: dict[tuple[str, int, int, _Beside], dict[_Read, None]] = defaultdict(dict)
    layer = {node: block_of_path(path) for node, path in places_of(joint).items()}

    def add(leaf: torch.fx.Node, reader: torch.fx.Node | None, consumer: int, slot: int) -> None:
        source = source_of(draft, leaf)
        if source is None:
            return
        read = _Read(*source, consumer, slot, (leaf, reader) in late)
        first.setdefault(read, (leaf, reader))
        name = producer_of(leaf)[0].name
        for gather, side in chains.gathers(leaf, reader, settings.reshard_after_forward):
            hidden = side >= 0 and settings.prefetch
            readers[name, source[1], gather, (side, layer[leaf]) if hidden else None][read] = None

    for node in joint.module.graph.nodes:
        if is_tensor_node(node):
            group = draft.group_of[node.name]
            for slot, leaf in enumerate(leaves_of(node)):
                add(leaf, node, group, slot)
    for where, result in zip(results, joint.module.graph.output_node().args[0], strict=True):
        if where is not None:
            add(result, None, *where)
    numbers = {read: i for i, read in enumerate(first)}
    moves = [
        (tuple(sorted(numbers[r] for r in reads)), beside)
        for (*_, beside), reads in readers.items()
    ]
    number, streams = _streams(joint, draft, layer, moves)
    alike = Counter((read, -1 if beside is None else number[beside]) for read, beside in moves)
    prices = RedistributionCosts(
        settings.shape, settings.topology, settings.device.memory_bandwidth
    )
    # what backward keeps from forward is moved in forward, so that both sides may share the move
    kept = set() if settings.reshard_after_forward else chains.held
    edges = tuple(
        _edge(draft, read, *nodes, prices, follows=nodes[0] not in kept)
        for read, nodes in first.items()
    )
    values = (Value(numbered, n, stream) for (numbered, stream), n in alike.items())
    return edges, tuple(values), streams


def _streams(
    joint: JointGraph,
    draft: Draft,
    layer: Mapping[torch.fx.Node, str],
    moves: Sequence[tuple[tuple[int, ...], _Beside]],
) -> tuple[dict[tuple[int, str], int], tuple[Stream, ...]]:
    """The number of each side and layer's stream, equal ones put together, and the streams."""
    computing: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    moving: dict[tuple[int, str], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for read, beside in moves:
        if beside is not None:
            moving[beside][read] += 1
    for node in joint.module.graph.nodes:
        beside = (BACKWARD if is_backward(node) else FORWARD, layer.get(node, ""))
        if is_tensor_node(node) and beside in moving:
            computing[beside][draft.group_of[node.name]] += 1
    looks: dict[Hashable, int] = {}
    number: dict[tuple[int, str], int] = {}
    total: list[tuple[int, Counter[int]]] = []
    for beside, reads in moving.items():
        look = (beside[0], frozenset(reads.items()), frozenset(computing[beside].items()))
        number[beside] = looks.setdefault(look, len(looks))
        if number[beside] == len(total):
            total.append((beside[0], Counter()))
        total[number[beside]][1].update(computing[beside])
    return number, tuple(Stream(side, tuple(sorted(own.items()))) for side, own in total)


def _edge(
    draft: Draft,
    read: _Read,
    leaf: torch.fx.Node,
    reader: torch.fx.Node | None,
    prices: RedistributionCosts,
    *,
    follows: bool,
) -> Edge:
    """Prices of the moves that an edge may make.

    On two axes and more, a value is moved in front of a one-input operator only where the operator
    cannot take it as it is: moving its result costs the same and leaves fewer variables.
    """
    value = leaf.meta["val"]
    sources = tuple(dict.fromkeys(given(o, read.output) for o in draft.options[read.producer]))
    targets = tuple(dict.fromkeys(wanted(o, read.slot) for o in draft.options[read.consumer]))
    seconds = prices.matrix(value, sources, targets)
    several_axes = len(prices.mesh_shape) > 1
    follow = follows and several_axes and reader is not None and _follows(reader, value)
    if follow:
        column = {q: j for j, q in enumerate(targets)}
        stays = np.array([column.get(p, -1) for p in sources])
        moves = np.arange(len(targets))[None, :] != stays[:, None]
        seconds = seconds.copy()  # prices are shared
        seconds[moves & (stays >= 0)[:, None]] = np.inf
    if read.late:
        seconds = seconds.copy()
        seconds[prices.ends_partial(sources, targets)] = np.inf
    return Edge(read.producer, read.output, read.consumer, read.slot, sources, targets, seconds)


def _follows(node: torch.fx.Node, value: torch.Tensor) -> bool:
    outputs = [v for v in outputs_of(node) if v is not None]
    out_bytes = sum(v.numel() * v.element_size() for v in outputs)
    return len(leaves_of(node)) == 1 and out_bytes <= value.numel() * value.element_size()
