"""Gathers of parameters and reduce-scatters of their gradients, several to one collective.

A collective of a few kilobytes takes as long as its latency. Those of one kind and one group, of
parameters of one block, are put together while their sum stays within the bytes that the user set; one
of more than half of these stays alone, so that nothing of size is held longer for it. Blocks are not mixed: what is
gathered together is used together. Nor are parameters that backward reads as they were gathered and those that
it does not, which it would otherwise gather for nothing. PyTorch's coalesced collectives take the tensors as they are, so no
buffer is filled and none emptied, and the numbers are the same to the bit.

The pass runs on the local graph, before its facts are taken: what a bucket holds is in every predicted
peak, and the all-gather contract follows the bucket as any other gather. A bucket of gathers stands
where its first one stood, with the casts and pads that lead to the others; one of reduce-scatters where
the last one stood, what follows the others behind it. A gather behind another gather (two mesh axes)
never shares a bucket with one in front of one, so no bucket waits for itself. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture.names import block_of_path
from ..config import CommConfig
from ..graph.cost import tensor_bytes
from ..sharding.apply import LocalGraph

_c10d = torch.ops._c10d_functional
_GATHER, _SCATTER = _c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default
_TOGETHER = {
    _GATHER: _c10d.all_gather_into_tensor_coalesced.default,
    _SCATTER: _c10d.reduce_scatter_tensor_coalesced.default,
}


@dataclass(frozen=True, slots=True)
class _Member:
    """A collective of one parameter; those with an equal `key` may share a bucket."""

    node: fx.Node
    key: tuple[Any, ...]
    bytes: int


def bucket(local: LocalGraph, comm: CommConfig) -> LocalGraph:
    """The graph with its collectives of parameters in buckets; it is changed in place."""
    graph = local.module.graph
    for kind, limit in (
        (_GATHER, comm.all_gather_bytes),
        (_SCATTER, comm.reduce_scatter_bytes),
    ):
        if limit is None:
            continue
        for nodes in _buckets(_members(graph, local, kind), limit):
            if kind is _GATHER:
                _gather_together(graph, nodes)
            else:
                _scatter_together(graph, nodes)
    graph.lint()
    local.module.recompile()
    return local


def _buckets(members: Iterable[_Member], limit: int) -> Iterator[list[fx.Node]]:
    """Lists of two or more collectives of equal key that together hold at most `limit` bytes."""
    open_: dict[tuple[Any, ...], list[fx.Node]] = {}
    held: dict[tuple[Any, ...], int] = {}
    for member in members:
        key = member.key
        if 2 * member.bytes > limit:
            continue  # alone: it would only part the small ones around it
        if held.get(key, 0) + member.bytes > limit:
            if len(open_[key]) > 1:
                yield open_[key]
            open_[key], held[key] = [], 0
        open_.setdefault(key, []).append(member.node)
        held[key] = held.get(key, 0) + member.bytes
    yield from [nodes for nodes in open_.values() if len(nodes) > 1]


def _members(graph: fx.Graph, local: LocalGraph, kind: Any) -> list[_Member]:
    found = []
    for node in graph.find_nodes(op="call_function", target=kind):
        note = node.meta["custom"]["autop_ac"]
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if not note["parameter"] or backward != (kind is _SCATTER):
            continue
        if kind is _GATHER and not _comes_from_a_parameter(node, local):
            continue
        if kind is _SCATTER and not _goes_out_alone(node):
            continue
        whole = node if kind is _GATHER else node.args[0]
        value = whole.meta["val"]
        name = note["parameter"]
        block = block_of_path(name) or name.rpartition(".")[0]
        again = kind is _GATHER and _is_read_by_backward(node)
        key = (node.args[1:], value.dtype, _depth(node, kind), block, again)
        found.append(_Member(node, key, tensor_bytes(value)))
    return found


def _comes_from_a_parameter(node: fx.Node, local: LocalGraph) -> bool:
    """Whether all that leads here comes from one parameter, so that it may be computed earlier."""
    holders = {n.name for n in _ancestors(node) if n.op == "placeholder"}
    return len(holders) == 1 and local.placeholders[holders.pop()].kind == "parameter"


def _is_read_by_backward(node: fx.Node) -> bool:
    """Whether backward itself reads what is gathered, and so gathers it again whatever is recomputed."""
    work = [node]
    while work:
        for user in work.pop().users:
            if "backward" in str(user.meta.get("partitioner_tag", "")):
                return True
            if user.op != "output" and len(user.all_input_nodes) == 1:
                work.append(user)
    return False


def _goes_out_alone(node: fx.Node) -> bool:
    """Whether what follows reads nothing else up to the output, so that it may be computed later."""
    users = [u for n in (node, *_descendants(node)) for u in n.users]
    return all(u.op == "output" or len(u.all_input_nodes) == 1 for u in users)


def _depth(node: fx.Node, kind: Any) -> int:
    """How many collectives of this kind lead to this one."""
    count, at = 0, _source(node)
    while at is not None:
        count += at.target is kind
        at = _source(at)
    return count


def _source(node: fx.Node) -> fx.Node | None:
    """What a value is made of, alone: of a ``cat`` of pieces, what these were cut from."""
    reads = node.all_input_nodes
    if len(reads) > 1:
        reads = list(dict.fromkeys(n for piece in reads for n in piece.all_input_nodes))
    return reads[0] if len(reads) == 1 else None


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    work = list(node.all_input_nodes)
    while work:
        at = work.pop()
        if at not in found:
            found.add(at)
            work.extend(at.all_input_nodes)
    return found


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    work = [u for u in node.users if u.op != "output"]
    while work:
        at = work.pop()
        if at not in found:
            found.add(at)
            work.extend(u for u in at.users if u.op != "output")
    return found


def _gather_together(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    place = {n: i for i, n in enumerate(graph.nodes)}
    first = nodes[0]
    needed = set().union(*(_ancestors(n) for n in nodes))
    for node in sorted((n for n in needed if place[n] > place[first]), key=place.__getitem__):
        first.prepend(node)
    with graph.inserting_before(first):
        _replace(graph, nodes)


def _scatter_together(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    place = {n: i for i, n in enumerate(graph.nodes)}
    last = nodes[-1]
    early = {n for node in nodes for n in _descendants(node) if place[n] < place[last]}
    with graph.inserting_before(last):
        at = _replace(graph, nodes)
    for node in sorted(early, key=place.__getitem__):
        at.append(node)
        at = node


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    """One collective in the place of several; gives the last node that is new."""
    first = nodes[0]
    target = _TOGETHER[first.target]
    together = graph.call_function(target, ([n.args[0] for n in nodes], *first.args[1:]))
    note = dict(first.meta["custom"]["autop_ac"])
    names = dict.fromkeys(n.meta["custom"]["autop_ac"]["parameter"] for n in nodes)
    note["parameter"] = ", ".join(names)
    together.meta = {
        **first.meta,
        "custom": {**first.meta["custom"], "autop_ac": note},
        "val": [n.meta["val"] for n in nodes],
    }
    for i, node in enumerate(nodes):
        part = graph.call_function(operator.getitem, (together, i))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
    return part
