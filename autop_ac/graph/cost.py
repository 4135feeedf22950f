"""Seconds per node: a roofline for computation, latency and bandwidth for collectives.

The time of an operator is the larger of its operations over the device's peak and its bytes read and
written over the memory's bandwidth. What a compiler's decompositions made of one captured operator
counts as one kernel: what they hand to each other is neither written nor read. Weaknesses: no launch
overhead, no cache, no fusion of several captured operators (a chain of elementwise ones counts each pass
over memory), peaks instead of what kernels reach.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from .._torch_sharding import OpOverload
from .devices import DeviceSpec, Link

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

_aten = torch.ops.aten
_NO_WORK = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
}
_EXTRA_BYTES_ONLY = {_aten.embedding.default, _aten.index_select.default, _aten.gather.default}


def collective_time_s(
    kind: Collective, bytes: int, group_size: int, link_bandwidth: float, latency: float
) -> float:
    """Seconds of one collective by ring algorithms.

    Args:
        kind: which collective.
        bytes: the larger of what one device gives and gets: the output of an all-gather, the input
            of a reduce-scatter, the tensor of an all-reduce, the local part of an all-to-all.
        group_size: number of devices; 1 costs nothing.
        link_bandwidth: bytes per second.
        latency: seconds of one pass however small.
    """
    if group_size <= 1:
        return 0.0
    passes = 2 if kind == "all_reduce" else 1
    return passes * (latency + bytes * (group_size - 1) / group_size / link_bandwidth)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of a dense tensor of that shape and dtype."""
    return value.numel() * value.element_size()


def _costs_nothing(op: Any) -> bool:
    return op is operator.getitem or (isinstance(op, OpOverload) and _is_free(op))


@cache
def _is_free(op: OpOverload) -> bool:
    return bool(op.is_view) or op in _NO_WORK


def _flops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    formula = flop_registry.get(getattr(op, "overloadpacket", op))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    name = str(getattr(op, "overloadpacket", op)).removeprefix("aten.")
    # on CPU: two products of [S, D] and [D, S] per head forward, five backward
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        q, k = args[0], args[1]
        return float(4 * q.numel() * k.shape[-2])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        q, k = args[1], args[2]
        return float(10 * q.numel() * k.shape[-2])
    return 0.0


def node_time_s(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: DeviceSpec
) -> float:
    """Seconds of one operator on values of local shapes (fake or meta tensors).

    Args:
        op: the operator.
        args, kwargs: its arguments, tensors where it takes tensors.
        out: what it gives.
    """
    if _costs_nothing(op):
        return 0.0
    tensors = _tensors((*args, *kwargs.values()))
    outputs = _tensors((out,))
    moved = sum(tensor_bytes(t) for t in [*tensors, *outputs])
    if op in _EXTRA_BYTES_ONLY:  # reads only the rows it is asked for
        moved = 2 * sum(tensor_bytes(t) for t in outputs)
    flops = _flops(op, args, kwargs, out)
    dtype = next((t.dtype for t in [*outputs, *tensors] if t.is_floating_point()), torch.float32)
    return max(flops / device.flops_of(dtype), moved / device.memory_bandwidth)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors in some values, most of which are tensors or plain."""
    found: list[torch.Tensor] = []
    for value in values:
        if _is_tensor(value):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += [t for t in pytree.tree_leaves(value) if _is_tensor(t)]
    return found


def fx_node_time_s(
    node: torch.fx.Node, device: DeviceSpec, links: Mapping[str, Link] | None = None
) -> float:
    """Seconds of one node of a local graph, from ``meta["val"]`` of itself and of its inputs.

    Args:
        links: by name of the mesh axis that the shard pass wrote on a collective; collectives over
            an axis that is not there take no time. Their waits take none: it is the collective's.
    """
    if node.op != "call_function":
        return 0.0
    if getattr(node.target, "namespace", "") in _COLLECTIVES:
        return _collective_time_s(node, links or {})
    if _costs_nothing(node.target):
        return 0.0

    def value(arg: Any) -> Any:
        if not isinstance(arg, torch.fx.Node):
            return arg
        return None if _one_kernel(_made_by(arg), node) else arg.meta.get("val")

    args = torch.fx.map_arg(node.args, value)
    kwargs = torch.fx.map_arg(node.kwargs, value)
    readers = _readers(node)
    kept = readers and all(_one_kernel(node, reader) for reader in readers)
    return node_time_s(node.target, args, kwargs, None if kept else node.meta.get("val"), device)


def _one_kernel(node: torch.fx.Node, reader: torch.fx.Node) -> bool:
    """Whether both came of one captured operator by decompositions, and neither is a product."""
    origin = _origin(node)
    return origin != "" and origin == _origin(reader) and _fuses(node) and _fuses(reader)


def _origin(node: torch.fx.Node) -> str:
    note = (node.meta.get("custom") or {}).get("autop_ac") or {}
    return str(note.get("origin", ""))


def _fuses(node: torch.fx.Node) -> bool:
    op = node.target
    return (
        isinstance(op, OpOverload)
        and op.overloadpacket not in flop_registry
        and op not in _EXTRA_BYTES_ONLY
        and op.namespace in ("aten", "prims")
    )


def _made_by(node: torch.fx.Node) -> torch.fx.Node:
    """What made a value that views hand on."""
    while _costs_nothing(node.target) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Who reads a value, itself or a view of it."""
    found = []
    for user in node.users:
        found += _readers(user) if _costs_nothing(user.target) and user.users else [user]
    return found


_KINDS: Mapping[str, Collective] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
_COLLECTIVES = ("_c10d_functional", "_dtensor")


def _collective_time_s(node: torch.fx.Node, links: Mapping[str, Link]) -> float:
    note = (node.meta.get("custom") or {}).get("autop_ac") or {}
    link = links.get(note.get("axis", ""))
    return 0.0 if link is None else collective_node_time_s(node, link)


def collective_node_time_s(node: torch.fx.Node, link: Link) -> float:
    """Seconds of a functional collective over `link`; its wait takes none."""
    name = str(node.target).split(".")[1].removesuffix("_coalesced")
    if name not in _KINDS:
        return 0.0
    read = [n.meta.get("val") for n in node.all_input_nodes]
    sides = (pytree.tree_leaves(node.meta.get("val")), pytree.tree_leaves(read))
    moved = max(sum(tensor_bytes(v) for v in side if _is_tensor(v)) for side in sides)
    return collective_time_s(_KINDS[name], moved, link.size, link.bandwidth, link.latency_s)
