"""What a call of `local_map` may be: its mesh, and placements that fit its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..errors import ConfigError
from .names import source_line


def check_call(
    settings: Mapping[str, Any],
    shapes: Sequence[Any],
    stack: str,
    depth: int,
    *,
    mesh: DeviceMesh | None,
) -> None:
    """Look at a call of `local_map` before Dynamo does.

    Args:
        settings: its arguments by name.
        shapes: of the inputs, None for what is no tensor.
        stack: the user's.
        depth: how many other calls it is inside of.
        mesh: that is planned for.

    Raises:
        ConfigError: the mesh is another one; placements do not fit it, the inputs, or their shapes.
    """
    where = f"local_map at {source_line(stack) or 'an unknown line'}"
    if depth:
        raise ConfigError(
            f"{where}: it is called inside of another local_map, where tensors are those of one device "
            "already. Call its function as it is"
        )
    own = settings["device_mesh"]
    if own is None:
        raise ConfigError(f"{where}: give it device_mesh=, the mesh that AutoParallel has")
    if mesh is None or own != mesh:
        raise ConfigError(
            f"{where}: device_mesh is {own}, and the model is planned for "
            f"{mesh or 'no mesh at all'}. Give it that mesh, the whole of it, and a placement for each of its "
            "axes"
        )
    for name in ("in_placements", "out_placements"):
        if not isinstance(settings[name], tuple) or any(
            isinstance(p, Placement) for p in settings[name]
        ):
            raise ConfigError(
                f"{where}: {name} is {settings[name]!r}: give a tuple with an entry for each tensor, "
                "such as ((Shard(0), Replicate()), (Replicate(), Replicate())), None for what is no tensor"
            )
    sizes = tuple(mesh.shape)
    for name in ("in_placements", "in_grad_placements"):
        entries = settings[name]
        if entries is None:
            continue
        if len(entries) != len(shapes):
            raise ConfigError(
                f"{where}: {name} has {len(entries)} entries for {len(shapes)} arguments: give one for each"
            )
        for i, (entry, shape) in enumerate(zip(entries, shapes, strict=True)):
            if (entry is None) != (shape is None):
                what = "no tensor: give None" if shape is None else "a tensor: give its placements"
                raise ConfigError(f"{where}: {name}[{i}] is {entry!r}, and argument {i} is {what}")
            if entry is not None:
                _check_placements(f"{where}: {name}[{i}]", entry, shape, sizes)
    for i, entry in enumerate(settings["out_placements"]):
        if entry is not None:
            _check_placements(f"{where}: out_placements[{i}]", entry, None, sizes)


def _check_placements(where: str, entry: Any, shape: Any, sizes: tuple[int, ...]) -> None:
    if not isinstance(entry, (tuple, list)) or len(entry) != len(sizes):
        raise ConfigError(
            f"{where} is {entry!r}: give a tuple of {len(sizes)} placements, one for each axis of the mesh "
            f"of shape {sizes}"
        )
    for placement in entry:
        if type(placement) not in (Shard, Replicate, Partial):
            raise ConfigError(
                f"{where} has {placement!r}: allowed are Shard, Replicate and Partial"
            )
        if isinstance(placement, Partial) and placement.reduce_op not in ("sum", "avg"):
            raise ConfigError(f'{where} has {placement!r}: a Partial is a "sum" or an "avg"')
    if shape is None:
        return
    left = list(shape)
    for placement, size in zip(entry, sizes, strict=True):
        if not isinstance(placement, Shard):
            continue
        if not -len(left) <= placement.dim < len(left):
            raise ConfigError(
                f"{where} has {placement!r}, and the argument's shape is {tuple(shape)}"
            )
        if left[placement.dim] % size:
            raise ConfigError(
                f"{where} is {tuple(entry)} and does not cut {tuple(shape)} into equal parts on a mesh of "
                f"shape {sizes}: the graph is the same on every device. Shard a dim that the axis divides, "
                "or pad it"
            )
        left[placement.dim] //= size
