"""Rules of ours for operators on images: convolution, norms of groups, pooling, resampling, padding.

Rows as in `own_rules`. Dim 0 is the batch and dim 1 the channels; dims after these are never cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_R, _S0, _S1, _P = Replicate(), Shard(0), Shard(1), Partial("sum")


def _channel_dims(transposed: bool) -> tuple[int, int]:
    """Dims of a weight that stand for the channels that come out, and for those that go in."""
    return (1, 0) if transposed else (0, 1)


def _convolution(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    transposed, groups = args[6], args[8]
    bias = [] if args[2] is None else [args[2]]
    gives, takes = _channel_dims(transposed)
    rows: list[Any] = [([_S0], [_S0, _R, *(_R for _ in bias)])]
    if groups == 1:
        rows.append(([_S1], [_R, Shard(gives), *(_S0 for _ in bias)]))
        if not bias:  # else each device would add it
            rows.append(([_P], [_S1, Shard(takes)]))
    elif not transposed:
        rows.append(([_S1], [_S1, _S0, *(_S0 for _ in bias)]))
    return rows


def _convolution_backward(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """Inputs are the gradient of the result, the input and the weight; outputs their gradients."""
    transposed, groups = args[7], args[9]
    gives, takes = _channel_dims(transposed)
    rows: list[Any] = [([_S0, _P, _P], [_S0, _S0, _R])]
    if groups == 1:
        rows.append(([_P, Shard(gives), _S0], [_S1, _R, Shard(gives)]))
        rows.append(([_S1, Shard(takes), _R], [_R, _S1, Shard(takes)]))
    elif not transposed:
        rows.append(([_S1, _S0, _S0], [_S1, _S1, _S0]))
    return rows


def _group_norm(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    scales = [a for a in args[1:3] if a is not None]
    return [
        ([_S0] * 3, [_S0, *(_R for _ in scales)]),
        ([_S1] * 3, [_S1, *(_S0 for _ in scales)]),
    ]


def _group_norm_backward(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    scales = [] if args[4] is None else [args[4]]
    return [
        ([_S0, _P, _P], [_S0] * 4 + [_R for _ in scales]),
        ([_S1, _S0, _S0], [_S1] * 4 + [_S0 for _ in scales]),
    ]


def _plane_by_plane(spatial: int) -> Callable[[Any, Any, Any], list[Any]]:
    """Each plane by itself: every dim in front of the last `spatial` ones may be sharded."""

    def rows(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        return [
            ([Shard(d)] * len(outputs), [Shard(d)] * len(tensors))
            for d in range(tensors[0].dim() - spatial)
        ]

    return rows


_PLANES = """
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()


def _planes() -> dict[Any, Callable[[Any, Any, Any], list[Any]]]:
    found = {}
    for name in _PLANES:
        digits = re.search(r"(\d)d", name)
        assert digits is not None
        packet = getattr(aten, name)
        for overload in ("default", "vec"):
            if overload in packet.overloads():
                found[getattr(packet, overload)] = _plane_by_plane(int(digits[1]))
    return found


IMAGE_RULES: Mapping[Any, Callable[[Any, Any, Any], list[Any]]] = {
    **_planes(),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
