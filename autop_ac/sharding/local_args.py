"""Arguments that speak of sizes, for local tensors: shapes, numbers of groups and of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _torch_sharding as private

aten = torch.ops.aten


def _groups(source: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> int:
    """Groups of a convolution: its weight has as many input channels as one group."""
    return groups if transposed or groups == 1 else source.shape[1] // weight.shape[1]


def _convolution(args: Any) -> Any:
    return (*args[:8], _groups(args[0], args[1], args[6], args[8]))


def _convolution_backward(args: Any) -> Any:
    mask = args[10]
    bias = [args[0].shape[1]] if mask[2] else args[3]
    groups = _groups(args[1], args[2], args[7], args[9])
    return (*args[:3], bias, *args[4:9], groups, mask)


def _group_norm(args: Any, first: int = 3) -> Any:
    """N, C, HxW and groups stand from `first` on; C is the global one."""
    value = args[0]
    batch, channels = value.shape[:2]
    groups = args[first + 3] * channels // args[first + 1]
    sizes = (batch, channels, math.prod(value.shape[2:]), groups)
    return (*args[:first], *sizes, *args[first + 4 :])


LOCAL_ARGS: Mapping[Any, Callable[[Any], Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: lambda args: _group_norm(args, 5),
}
# the argument that is the shape of the result; DTensor knows more
_SHAPES: Mapping[Any, int] = {
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
}


def local_sizes(op: Any, args: Any, value: Any, shape: tuple[int, ...] | None) -> Any:
    """The arguments with sizes of local tensors.

    Args:
        args: local tensors among them.
        value: what the operator gives on global shapes.
        shape: of the local result, where it is one tensor.
    """
    if op in LOCAL_ARGS:
        return LOCAL_ARGS[op](args)
    where = _SHAPES.get(op, private.sharding_propagator.op_to_shape_and_stride_idx.get(op))
    if where is None or shape is None or not isinstance(value, torch.Tensor):
        return args
    if shape == tuple(value.shape):
        return args
    changed = list(args)
    changed[where[0] if isinstance(where, tuple) else where] = list(shape)
    if isinstance(where, tuple):
        changed[where[1]] = list(torch.empty(shape, device="meta").stride())
    return tuple(changed)
