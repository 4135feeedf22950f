"""Rules of ours for one mesh axis, where DTensor has none: rows of (outputs, inputs).

A rule is a function of ``(args, kwargs, outputs)``, with fake tensors in place of tensors. The
replicated row need not be among what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from .image_rules import IMAGE_RULES
from .index_rules import INDEX_RULES

aten = torch.ops.aten


def _elementwise(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """One tensor in, outputs of its shape: every dim may be sharded."""
    value = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor))
    return [
        ([None if o is None else Shard(d) for o in outputs], [Shard(d)])
        for d in range(value.dim())
        if all(o is None or o.dim() == value.dim() for o in outputs)
    ]


def _copy(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """``copy(self, src)`` where both have one shape."""
    target, source = args[0], args[1]
    dims = range(target.dim()) if target.shape == source.shape else ()
    return [([Shard(d)], [Shard(d), Shard(d)]) for d in dims]


def _attention(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """Batch and heads (dims 0 and 1 of every tensor) are independent of each other."""
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    mask = kwargs.get("attn_mask")
    rows: list[Any] = []
    for dim in (0, 1):
        ins: list[Placement] = []
        for t in tensors:
            from_end = t.dim() == 4 or t is not mask
            there = from_end and t.shape[dim] > 1
            ins.append(Shard(dim) if there or t is not mask else Replicate())
        rows.append(([None if o is None else Shard(dim) for o in outputs], ins))
    return rows


def _filled(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """One value everywhere: each device makes its part."""
    return [([Shard(d)], []) for d in range(outputs[0].dim())]


def _new(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """One value everywhere, of the dtype of a tensor, which may lie as it likes."""
    source, out = args[0], outputs[0]
    anyhow = [Replicate(), *(Shard(d) for d in range(source.dim())), Partial("sum")]
    rows: list[Any] = [([Replicate()], [p]) for p in anyhow]
    for d in range(out.dim()):
        rows.append(([Shard(d)], [Replicate()]))
        if d < source.dim() and source.shape[d] == out.shape[d]:
            rows.append(([Shard(d)], [Shard(d)]))
    return rows


def _new_zeros(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """As `_new`; zeros sum up to zeros, so that what is added to them may be summed later."""
    rows = _new(args, kwargs, outputs)
    return [*rows, *(([Partial("sum")], ins) for outs, ins in rows if outs == [Replicate()])]


def _weight_norm(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """Norms along all dims but the last argument."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    dim = args[-1] % tensors[0].dim() if isinstance(args[-1], int) else 0
    return [([Shard(dim)] * len(outputs), [Shard(dim)] * len(tensors))]


OWN_RULES: Mapping[Any, Callable[[Any, Any, Any], list[Any]]] = {
    aten.bernoulli.p: _elementwise,
    aten.bernoulli.default: _elementwise,
    aten.lift_fresh_copy.default: _elementwise,
    aten.copy.default: _copy,
    aten.native_dropout.default: _elementwise,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention,
    aten.full.default: _filled,
    aten.zeros.default: _filled,
    aten.ones.default: _filled,
    aten.empty.memory_format: _filled,
    aten.new_zeros.default: _new_zeros,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty.default: _new,
    aten._weight_norm_interface.default: _weight_norm,
    aten._weight_norm_interface_backward.default: _weight_norm,
    **IMAGE_RULES,
    **INDEX_RULES,
}
