"""Flex attention: batch and heads are independent, and its functions are told which these are.

A device that has some batches or heads counts them from zero, and ``score_mod(score, b, h, i, j)`` may
look at `b` and `h`: where they are cut, the functions are given the numbers of the whole. What they look
things up in is whole on every device, so that its gradient is what those of all devices add up to.
Of a block mask, a tensor that has a batch or heads is cut as these are; one mask for all is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from .._torch_flex import flex_attention, flex_attention_backward
from .plan import Placements

FLEX = (flex_attention, flex_attention_backward)
_FORWARD_MASK, _BACKWARD_MASK = 4, 9  # where the block mask is among the arguments
_AFTER = 3  # from the block mask to what the functions look things up in


def flex_rows(op: Any, args: Any) -> list[Any]:
    """Rows of one mesh axis: along the batch, and along the heads."""
    backward = op is flex_attention_backward
    place = _BACKWARD_MASK if backward else _FORWARD_MASK
    query, key = args[0], args[1]
    rows: list[Any] = []
    for dim in (0, 1):
        cut = Shard(dim)
        # one batch or head of keys for all
        keys: Placement = Replicate() if key.shape[dim] == 1 < query.shape[dim] else cut
        ins = [cut, keys, keys, *(cut for t in args[3:place] if isinstance(t, torch.Tensor))]
        ins += [cut if t.shape[dim] > 1 else Replicate() for t in _tensors(args[place])]
        looked_up = _tensors(args[place + _AFTER :])
        ins += [Replicate()] * len(looked_up)
        outs: list[Placement | None] = [cut, cut, cut]
        if backward:
            theirs = Partial() if isinstance(keys, Replicate) else keys
            outs = [cut, theirs, theirs, *_captured(args)]
        rows.append((tuple(outs), tuple(ins)))
    return rows


def _captured(args: Any) -> list[Placement | None]:
    """Placements of the gradients of what `score_mod` looks things up in."""
    return [
        Partial() if isinstance(t, torch.Tensor) else None for t in args[_BACKWARD_MASK + _AFTER]
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def flex_shapes(op: Any, args: Any) -> Any:
    """What the operator gives on arguments of local shapes, as meta tensors; its functions are not run."""
    query, key, value = args[:3]
    if op is flex_attention_backward:
        captured = args[_BACKWARD_MASK + _AFTER]
        given = tuple(t if isinstance(t, torch.Tensor) else None for t in captured)
        return (query, key, value, given)
    if query.shape[0] != key.shape[0] != 1 or query.shape[1] % key.shape[1]:
        raise ValueError("batches and heads of queries and keys do not fit")
    rows = query.shape[:3]
    numbers = query.new_empty(rows, dtype=torch.float32)
    return query.new_empty((*rows, value.shape[3])), numbers, numbers


def with_offsets(
    op: Any, args: Any, shape: Sequence[int], placed: Placements, mesh: DeviceMesh
) -> Any:
    """The arguments with functions that count batches and heads on, where these are cut.

    Args:
        shape, placed: of the queries; the shape is that of all devices together.
    """
    own = [_first_of(dim, shape[dim], placed, mesh) for dim in (0, 1)]
    place = _BACKWARD_MASK if op is flex_attention_backward else _FORWARD_MASK
    changed = list(args)
    for i in range(3, place):  # the score function, and with its gradient
        if isinstance(args[i], fx.GraphModule):
            changed[i] = _counting_on(args[i], 1, own)
    mask = args[place]
    changed[place] = (*mask[:-1], _counting_on(mask[-1], 0, own))
    return tuple(changed)


def _first_of(dim: int, size: int, placed: Placements, mesh: DeviceMesh) -> int | None:
    """Number of the first of this device's batches or heads; None where it has all."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    cut, first = False, 0
    for axis, placement in enumerate(placed):
        if isinstance(placement, Shard) and placement.dim == dim:
            size //= mesh.size(axis)
            cut, first = True, first + coordinate[axis] * size
    return first if cut else None


def _counting_on(function: fx.GraphModule, first: int, own: Sequence[int | None]) -> fx.GraphModule:
    """The function with numbers added to its arguments from `first` on; all ranks get the same graph."""
    made = fx.GraphModule(function, copy.deepcopy(function.graph))
    holders = made.graph.find_nodes(op="placeholder")
    for holder, number in zip(holders[first : first + len(own)], own, strict=True):
        if number is None or not holder.users:
            continue
        with made.graph.inserting_before(holders[-1].next):
            added = made.graph.call_function(torch.ops.aten.add.Tensor, (holder, number))
        holder.replace_all_uses_with(added, delete_user_cb=lambda user, a=added: user is not a)
    made.recompile()
    return made
