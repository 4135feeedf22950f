"""Rules of ours for operators that read or write where a tensor of indices says. Rows as in `own_rules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
_R, _P = Replicate(), Partial("sum")


def _places(
    value: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[dict[int, int], range]:
    """Where the dims of a value that are not indexed end in the result, and where the index does.

    The dims of the indices stand where the indexed dims stood, or in front where these do not lie
    together.
    """
    indexed = [d for d, index in enumerate(indices) if index is not None]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    width = max(indices[d].dim() for d in indexed)  # type: ignore[union-attr]
    start = indexed[0] if together else 0
    kept = [d for d in range(value.dim()) if d not in indexed]
    order = [*kept[:start], *([-1] * width), *kept[start:]]
    return {d: order.index(d) for d in kept}, range(start, start + width)


def _cut(tensor: torch.Tensor, dim: int, dims: int, size: int) -> Placement:
    """A tensor that is broadcast to `dims` dims, cut along `dim` of the result where it has that size."""
    own = dim - (dims - tensor.dim())
    return Shard(own) if own >= 0 and tensor.shape[own] == size and size > 1 else _R


def _index(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    value, indices = args[0], args[1]
    given = [i for i in indices if i is not None]
    if not given or any(i.dtype is torch.bool for i in given):
        return []
    out, (places, width) = outputs[0], _places(value, indices)
    rows: list[Any] = [
        ([Shard(place)], [Shard(d), *(_R for _ in given)]) for d, place in places.items()
    ]
    for j, dim in enumerate(width):
        size = out.shape[dim]
        rows.append(([Shard(dim)], [_R, *(_cut(i, j, len(width), size) for i in given)]))
    rows.append(([_P], [_P, *(_R for _ in given)]))
    return rows


def _index_put(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    value, indices, new = args[:3]
    given = [i for i in indices if i is not None]
    if not given or any(i.dtype is torch.bool for i in given):
        return []
    places, width = _places(value, indices)
    dims = len(places) + len(width)
    rows: list[Any] = [
        ([Shard(d)], [Shard(d), *(_R for _ in given), _cut(new, place, dims, value.shape[d])])
        for d, place in places.items()
    ]
    if len(args) > 3 and args[3]:  # adds: what is written may be added up later
        rows.append(([_P], [_P, *(_R for _ in given), _P]))
        shape = torch.broadcast_shapes(*(i.shape for i in given))
        for j, dim in enumerate(width):
            if shape[j] == 1:
                continue  # nothing is cut, and every device would add all
            cuts = [_cut(i, j, len(width), shape[j]) for i in given]
            rows.append(([_P], [_P, *cuts, _cut(new, dim, dims, shape[j])]))
    return rows


def _scatter(args: Any, kwargs: Any, outputs: Any) -> list[Any]:
    """Dims other than the one that is scattered along, where all sizes there are equal."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    along = args[1] % max(1, args[0].dim())
    return [
        ([Shard(d)], [Shard(d)] * len(tensors))
        for d in range(args[0].dim())
        if d != along and len({t.shape[d] for t in tensors}) == 1
    ]


INDEX_RULES: Mapping[Any, Callable[[Any, Any, Any], list[Any]]] = {
    aten._unsafe_index.Tensor: _index,
    aten._unsafe_index_put.default: _index_put,
    aten.scatter.reduce: _scatter,
    aten.scatter.value_reduce: _scatter,
    aten.scatter_reduce.two: _scatter,
}
