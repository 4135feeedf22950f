"""Batch norm in training, written as sums over the batch and the number of its elements.

The operator takes statistics of what it sees, so that a device with a part of the batch would normalise
by those of its part. Sums are added up over devices, and the number is that of the whole batch: what
`SyncBatchNorm` does, at the price of one small sum for each statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Stats = torch.Tensor | None


def _sums(x: torch.Tensor) -> tuple[list[int], int, list[int]]:
    """Dims that statistics go over, how many elements that are, and their shape."""
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [x.shape[1] if d == 1 else 1 for d in range(x.dim())]
    return dims, math.prod(x.shape[d] for d in dims), shape


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _normalised(
    x: torch.Tensor, weight: Stats, bias: Stats, mean: Stats, var: Stats,
    training: bool, momentum: float, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The result, mean and 1 / deviation of the batch, and the new running statistics."""
    dims, count, shape = _sums(x)
    wide = _wide(x)
    new_mean, new_var = mean, var
    if training:
        own_mean = wide.sum(dims) / count
        centred = wide - own_mean.view(shape)
        own_var = (centred * centred).sum(dims) / count
        if mean is not None:
            new_mean = (momentum * own_mean + (1 - momentum) * mean).to(mean.dtype)
        if var is not None:
            unbiased = own_var * (count / max(1, count - 1))
            new_var = (momentum * unbiased + (1 - momentum) * var).to(var.dtype)
    else:
        assert mean is not None and var is not None
        own_mean, own_var = mean, var
        centred = wide - own_mean.view(shape)
    scale = torch.rsqrt(own_var + eps)
    out = centred * scale.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    kept = (own_mean, scale) if training else (x.new_zeros(0), x.new_zeros(0))
    return (out.to(x.dtype), *kept, new_mean, new_var)  # type: ignore[return-value]


def _functional(*args: Any) -> Any:
    return _normalised(*args)


def _without_stats(
    x: torch.Tensor, weight: Stats, bias: Stats, training: bool, momentum: float, eps: float
) -> Any:
    return _normalised(x, weight, bias, None, None, training, momentum, eps)[:3]


def _backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Stats, running_mean: Stats, running_var: Stats,
    mean: Stats, scale: Stats, training: bool, eps: float, mask: list[bool],
) -> tuple[Stats, Stats, Stats]:  # fmt: skip
    dims, count, shape = _sums(x)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, scale = running_mean, torch.rsqrt(running_var + eps)
    assert mean is not None and scale is not None
    wide = _wide(grad)
    centred = _wide(x) - mean.view(shape)
    total = wide.sum(dims)
    along = (wide * centred).sum(dims) * scale
    gradient = None
    if mask[0]:
        inner = wide
        if training:
            moved = (along * scale / count).view(shape)
            inner = wide - (total / count).view(shape) - centred * moved
        factor = scale if weight is None else scale * weight
        gradient = (inner * factor.view(shape)).to(x.dtype)
    dtype = x.dtype if weight is None else weight.dtype
    return gradient, along.to(dtype) if mask[1] else None, total.to(dtype) if mask[2] else None


BATCH_NORM: Mapping[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _functional,
    aten._native_batch_norm_legit.no_stats: _without_stats,
    aten.native_batch_norm_backward.default: _backward,
}

NAME = str(aten.batch_norm.default)


def is_part(node: torch.fx.Node) -> bool:
    """Whether a forward node is a batch norm of any kind, or one of the operators that it is made of here."""
    # as text: what a node came from is a copy of the operator, which is not equal to it
    name = str(node.meta.get("original_aten") or node.target)
    return "batch_norm" in name and "backward" not in name
