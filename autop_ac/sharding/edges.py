"""Reads of values by groups, each with the prices of the moves it may make."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Partial

from ..capture.joint import JointGraph
from .chains import gathered_twice, reduced_late
from .costs import RedistributionCosts
from .formulation import Edge
from .groups import Draft, Settings, source_of
from .option import given, leaves_of, outputs_of, wanted
from .plan import Placements


def collect_edges(
    joint: JointGraph,
    draft: Draft,
    results: Sequence[tuple[int, int] | None],
    settings: Settings,
) -> tuple[Edge, ...]:
    prices = RedistributionCosts(
        settings.shape, settings.topology, settings.device.memory_bandwidth
    )
    twice = gathered_twice(joint) if settings.reshard_after_forward else set()
    late = reduced_late(joint, settings.reduce_dtype)
    numbers: dict[tuple[int, int], int] = {}
    edges = []

    def add(leaf: torch.fx.Node, reader: torch.fx.Node | None, consumer: int, slot: int) -> None:
        source = source_of(draft, leaf)
        if source is None:
            return
        value = leaf.meta["val"]
        seconds = _pairs(
            draft, source, (consumer, slot), value, prices,
            factor=2.0 if leaf in twice else 1.0,
            keep_partial=(leaf, reader) in late,
            follow=settings.mesh.ndim > 1 and reader is not None and _follows(reader, value),
        )  # fmt: skip
        number = numbers.setdefault(source, len(numbers))
        edges.append(Edge(number, *source, consumer, slot, seconds))

    for group, node in enumerate(draft.nodes):
        if node is not None and node.op == "call_function":
            for slot, leaf in enumerate(leaves_of(node)):
                add(leaf, node, group, slot)
    for where, result in zip(results, joint.module.graph.output_node().args[0], strict=True):
        if where is not None:
            add(result, None, *where)
    return tuple(edges)


def _pairs(
    draft: Draft,
    source: tuple[int, int],
    reader: tuple[int, int],
    value: torch.Tensor,
    prices: RedistributionCosts,
    *,
    factor: float,
    keep_partial: bool,
    follow: bool,
) -> dict[tuple[Placements, Placements], float]:
    """Prices of the moves that an edge may make.

    With `follow`, a value is moved in front of a one-input operator only where the operator cannot
    take it as it is: moving its result costs the same and leaves fewer variables.
    """
    sources = dict.fromkeys(given(o, source[1]) for o in draft.options[source[0]])
    targets = dict.fromkeys(wanted(o, reader[1]) for o in draft.options[reader[0]])
    seconds = {}
    for p in sources:
        for q in targets:
            if p != q and follow and p in targets:
                continue
            leaves = any(isinstance(a, Partial) and a != b for a, b in zip(p, q, strict=True))
            if keep_partial and leaves:
                continue
            price = prices.seconds(value, p, q)
            if price is not None:
                seconds[p, q] = price * factor
    return seconds


def _follows(node: torch.fx.Node, value: torch.Tensor) -> bool:
    outputs = [v for v in outputs_of(node) if v is not None]
    out_bytes = sum(v.numel() * v.element_size() for v in outputs)
    return len(leaves_of(node)) == 1 and out_bytes <= value.numel() * value.element_size()
