"""Rows that DTensor gives and that are wrong for plain local operators, whose shapes do not show it.

DTensor knows global shapes when it runs an operator; a local operator does not. So one that divides by
the number of elements, or counts values, or reads two tensors of different sizes row by row, may take
parts only where each part is to itself what the whole is to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch_sharding as private
from .local_args import LOCAL_ARGS

_MEAN = 1  # of torch's reduction argument
_SCANS = ("aten.cum", "aten._cum", "aten.logcumsumexp")
_PAIRED = ("aten.gather", "aten.scatter", "aten.index_add", "aten.index_copy")


def is_unsound(
    op: Any,
    args: Any,
    kwargs: Any,
    tensors: Sequence[torch.Tensor],
    outs: Sequence[Placement | None],
    ins: Sequence[Placement],
) -> bool:
    """Whether the row ``ins -> outs`` is wrong on local tensors though their shapes agree."""
    name = str(op)
    parts = any(not isinstance(p, Replicate) for p in ins)
    if torch.Tag.nondeterministic_seeded in op.tags and any(isinstance(p, Partial) for p in ins):
        return True
    if "nll_loss" in name and Partial("avg") in outs:
        return True  # devices may ignore different numbers of targets
    if "loss" in name or name.startswith("aten.binary_cross_entropy"):
        mean = _argument(op, args, kwargs, "reduction") == _MEAN
        if mean and "backward" in name and "nll_loss" not in name and parts:
            return True  # divides by the number of elements that it sees
    if _argument(op, args, kwargs, "scale_grad_by_freq") is True and parts:
        return True  # counts the indices that it sees
    if name.startswith(_PAIRED) and _differ(tensors, ins):
        return True  # the row i of one part is not the row i of the other
    if "batch_norm" in name and "no_training" not in name:
        # local statistics are not those of the whole batch
        if isinstance(ins[0], Shard) and ins[0].dim != 1:
            return True
        if any(isinstance(p, Partial) for p in [*outs, *ins]):
            return True
    if name.startswith(_SCANS) and _argument(op, args, kwargs, "dim") is not None:
        along = _argument(op, args, kwargs, "dim") % max(1, tensors[0].dim())
        return any(isinstance(p, Shard) and p.dim == along for p in ins)
    # its scalar sizes speak of global shapes, and nothing adapts them
    adapted = op not in private.sharding_propagator.op_to_scalar_shape_adjuster or op in LOCAL_ARGS
    return parts and not adapted


def _differ(tensors: Sequence[torch.Tensor], ins: Sequence[Placement]) -> bool:
    """Whether tensors that are cut along one dim have different sizes there."""
    sizes: dict[int, set[int]] = {}
    for tensor, placement in zip(tensors, ins, strict=True):
        if isinstance(placement, Shard):
            sizes.setdefault(placement.dim, set()).add(tensor.shape[placement.dim])
    return any(len(found) > 1 for found in sizes.values())


def _argument(op: Any, args: Any, kwargs: Any, name: str) -> Any:
    for argument, given in zip(op._schema.arguments, args, strict=False):
        if argument.name == name:
            return given
    if name in kwargs:
        return kwargs[name]
    return next((a.default_value for a in op._schema.arguments if a.name == name), None)
