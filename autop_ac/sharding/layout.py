"""Shapes and bytes of one device's part of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ..errors import ConfigError
from .plan import Placements


def replicated(mesh_shape: Sequence[int]) -> Placements:
    return (Replicate(),) * len(mesh_shape)


def local_bytes(
    shape: Sequence[int], itemsize: int, placements: Placements, mesh_shape: Sequence[int]
) -> int:
    """Bytes of the largest shard, each cut rounded up."""
    sizes = list(shape)
    for placement, count in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // count)
    return math.prod(sizes) * itemsize


def divides(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Whether every Shard cuts its dim into equal parts."""
    return even_local_shape(shape, placements, mesh_shape) is not None


def counted(placements: Sequence[Placement], shape: Sequence[int], whose: str) -> Placements:
    """The same with dims counted from the front.

    Args:
        whose: how the message begins, with the tensor: ``"input x"``.

    Raises:
        ConfigError: a dim is not one of the tensor.
    """
    ndim = len(shape)
    for p in placements:
        if isinstance(p, Shard) and not -ndim <= p.dim < ndim:
            allowed = f"dims are 0 to {ndim - 1}, or -{ndim} to -1" if ndim else "it has no dim"
            raise ConfigError(
                f"{whose}: Shard({p.dim}) of a tensor of shape {tuple(shape)}: {allowed}, and Replicate() keeps it whole"
            )
    return tuple(Shard(p.dim % ndim) if type(p) is Shard else p for p in placements)


def even_local_shape(
    shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]
) -> tuple[int, ...] | None:
    """The local shape, or None where a dim does not divide."""
    local = list(shape)
    for placement, size in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(local) or local[placement.dim] % size:
                return None
            local[placement.dim] //= size
    return tuple(local) if 0 not in local or 0 in shape else None


def free_placements(
    shape: Sequence[int], mesh_shape: Sequence[int], *, uneven: bool = False
) -> list[Placements]:
    """Every placement without Partial of a tensor; with `uneven`, shards need not be equal."""
    per_axis = [[Replicate(), *(Shard(d) for d in range(len(shape)))] for _ in mesh_shape]
    found = []
    for placements in itertools.product(*per_axis):
        ok = divides(shape, placements, mesh_shape)
        if ok or (uneven and _large_enough(shape, placements, mesh_shape)):
            found.append(tuple(placements))
    return found


def _large_enough(shape: Sequence[int], placements: Placements, mesh_shape: Sequence[int]) -> bool:
    """Uneven shards of which none is empty, each dim cut by one axis only."""
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    pairs = zip(placements, mesh_shape, strict=True)
    return len(set(dims)) == len(dims) and all(
        shape[p.dim] > n * (-(-shape[p.dim] // n) - 1) and shape[p.dim] >= n
        and -(-shape[p.dim] // n) * (n - 1) < shape[p.dim]
        for p, n in pairs if isinstance(p, Shard)
    )  # fmt: skip
