"""Sizes of the inputs of one call: of each rank's part, and of the whole that the parts make.

Where sizes may change between calls, a rank cannot tell from its own part what the others have, and
must not run another graph than they do: all tell each other their sizes, at each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ..errors import UsageError

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


def parts(size: int, counts: Sequence[int]) -> list[int]:
    """Sizes of the parts of one dim, cut by each of some mesh axes in turn as DTensor cuts it."""
    if not counts:
        return [size]
    chunk = -(-size // counts[0])
    first = [min(chunk, max(0, size - i * chunk)) for i in range(counts[0])]
    return [n for part in first for n in parts(part, counts[1:])]


def whole_shape(
    name: str,
    shapes: dict[tuple[int, ...], Shape],
    placements: Placements,
    mesh_shape: Sequence[int],
) -> Shape:
    """Global shape of an input from the shapes of its parts.

    Args:
        name: of the input, for messages.
        shapes: of each part, by coordinate in the mesh.

    Raises:
        UsageError: these are not the parts that `placements` cut a tensor into.
    """
    sizes = []
    for dim in range(len(next(iter(shapes.values())))):
        axes = [a for a, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        first = {c: s[dim] for c, s in shapes.items() if not any(
            n for a, n in enumerate(c) if a not in axes)}  # fmt: skip
        total = sum(first.values())
        expected = parts(total, [mesh_shape[a] for a in axes])
        places = itertools.product(*(range(mesh_shape[a]) for a in axes))
        wanted = dict(zip(places, expected, strict=True))
        if any(s[dim] != wanted[tuple(c[a] for a in axes)] for c, s in shapes.items()):
            raise UsageError(
                f"input {name} has local sizes {[s[dim] for s in shapes.values()]} in dim {dim} over the "
                f"ranks, and the parts of {total} are {expected} along mesh axes {axes}, equal along the "
                "others: pass each rank its part as torch.chunk cuts it"
            )
        sizes.append(total)
    return tuple(sizes)


def local_part(
    shape: Shape, placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Shape:
    """Shape of the part at `coordinate` of a tensor of global `shape`."""
    local = list(shape)
    for placement, count, at in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = parts(local[placement.dim], [count])[at]
    return tuple(local)


def divided(shape: Shape, placements: Placements, mesh_shape: Sequence[int]) -> Placements:
    """`placements` where they cut into equal parts, whole on a mesh axis where they do not."""
    local = list(shape)
    found: list[Placement] = []
    for placement, count in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            if not local[placement.dim] or local[placement.dim] % count:
                placement = Replicate()
            else:
                local[placement.dim] //= count
        found.append(placement)
    return tuple(found)


def exchange(mesh: DeviceMesh) -> Callable[[Sequence[int]], dict[tuple[int, ...], list[int]]]:
    """A function that tells some numbers to all ranks of `mesh`, and gives those of each coordinate.

    It waits for no device: the numbers go over a process group of the hosts, made at the first call,
    which all ranks make together.
    """
    ranks: list[int] = mesh.mesh.flatten().tolist()
    places = list(itertools.product(*map(range, mesh.shape)))
    where = dict(zip(ranks, places, strict=True))
    group: list[Any] = []

    def tell(numbers: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
        if mesh.size() == 1 or dist.get_backend() == "fake":  # others, if any, are as this one
            return {place: list(numbers) for place in places}
        if not group:
            group.append(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(found, own, group=group[0])
        told = dict(zip(sorted(ranks), found, strict=True))  # a group is in order of rank
        return {where[rank]: told[rank].tolist() for rank in ranks}

    return tell
