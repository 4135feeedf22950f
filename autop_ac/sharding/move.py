"""What the shard pass inserts to bring a local tensor from one placement to another.

DTensor moves it, but for what goes from one Shard to another: that is one all-to-all here, on every
device. DTensor has none for CPU meshes, on which clusters of GPUs are planned too, and gathers the whole
tensor there; the one that it has for others is waited for at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from .. import _torch as private
from .layout import even_local_shape
from .plan import Placements

_c10d = torch.ops._c10d_functional


def make_spec(value: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Any:
    """DTensor's description of a global tensor with the given placements."""
    meta = private.TensorMeta(value.shape, value.stride(), value.dtype)
    return private.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def move(
    local: torch.Tensor, value: torch.Tensor, have: Placements, wanted: Placements, mesh: DeviceMesh
) -> Any:
    """A local tensor at other placements.

    Axes change from the last to the first, as `costs` prices them.

    Args:
        local: this device's part of `value` at the placements `have`.
        value: of global shape.
    """
    steps = _steps(value, tuple(have), tuple(wanted), mesh)
    for axis, before, after in steps:
        a, b = before[axis], after[axis]
        if isinstance(a, Shard) and isinstance(b, Shard):
            local = _exchange(local, a.dim, b.dim, mesh, axis)
        else:
            source, target = make_spec(value, mesh, before), make_spec(value, mesh, after)
            local = private.redistribute_local_tensor(local, source, target)
    if steps:
        return local
    source, target = make_spec(value, mesh, have), make_spec(value, mesh, wanted)
    return private.redistribute_local_tensor(local, source, target)


def _steps(
    value: torch.Tensor, have: Placements, wanted: Placements, mesh: DeviceMesh
) -> list[tuple[int, Placements, Placements]]:
    """(axis, placements before, after) of each axis that changes; none where DTensor does it at once.

    That is where nothing is exchanged, and where axes cannot change one after the other: an inner axis
    cuts what an outer one is about to cut, or shards are uneven.
    """
    found = []
    exchanges, now = False, have
    for axis in reversed(range(mesh.ndim)):
        if now[axis] == wanted[axis]:
            continue
        after = (*now[:axis], wanted[axis], *now[axis + 1 :])
        ends = [p for p in (now[axis], wanted[axis]) if isinstance(p, Shard)]
        if any(p in ends for p in now[axis + 1 :]):
            return []
        if len(ends) == 2:
            exchanges = True
            shapes = (even_local_shape(value.shape, p, mesh.shape) for p in (now, after))
            if any(shape is None for shape in shapes):
                return []
        found.append((axis, now, after))
        now = after
    return found if exchanges else []


def _exchange(
    local: torch.Tensor, gathered: int, cut: int, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """One all-to-all: dim `gathered`, of which each device has a part, is whole, and dim `cut` is in parts."""
    count = mesh.size(axis)
    parts = local.unflatten(cut, (count, local.shape[cut] // count)).movedim(cut, 0).contiguous()
    group = mesh.get_group(axis).group_name
    got = _c10d.all_to_all_single(parts, [1] * count, [1] * count, group)
    got = _c10d.wait_tensor(got).movedim(0, gathered)
    return got.flatten(gathered, gathered + 1).contiguous()  # as what DTensor brings
