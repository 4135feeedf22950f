"""Local parts of many DTensors at once, by private parts of torch 2.13.

`DTensor.to_local` costs an autograd function each, and makes the description of the gradient anew at
every backward. Here one function serves all, and a gradient is described as its parameter is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local_parts(tensors: Sequence[Any]) -> list[Any]:
    """The local tensor of each DTensor, anything else as it is; gradients come back as DTensors."""
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    if not all(isinstance(t, DTensor) for t in tensors):
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    trained = [i for i, t in enumerate(tensors) if t.requires_grad]
    parts: list[Any] = [t._local_tensor for t in tensors]
    for i, part in zip(trained, _LocalParts.apply(*[tensors[i] for i in trained]), strict=True):
        parts[i] = part
    return parts


class _LocalParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[torch.Tensor, ...]:
        ctx.specs = [t._spec for t in tensors]
        ctx.set_materialize_grads(False)
        return tuple(t._local_tensor.view_as(t._local_tensor) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.specs, strict=True)
        return tuple(None if g is None else _described(g, spec) for g, spec in pairs)


def _described(gradient: torch.Tensor, spec: Any) -> DTensor:
    meta = spec.tensor_meta
    if gradient.dtype == meta.dtype:
        return DTensor(gradient, spec, requires_grad=gradient.requires_grad)
    return DTensor.from_local(
        gradient, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )
