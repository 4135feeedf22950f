"""Decisions that all ranks of a mesh must take alike: the first rank decides, the others receive.

A search that stops at a time limit, or sizes that differ because a shard is uneven, may lead ranks apart;
their collectives would then meet in another order, which gives wrong numbers or no end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import AutopACError

T = TypeVar("T")


def is_shared(mesh: DeviceMesh) -> bool:
    """Whether other processes take part: not on a fake mesh, nor on one device."""
    return mesh.size() > 1 and dist.is_initialized() and dist.get_backend() != "fake"


def from_first_rank(mesh: DeviceMesh, decide: Callable[[], T]) -> T:
    """What `decide` gives, or raises, on the mesh's first rank; it runs there alone.

    What it gives, or the error of ours that it raises, is pickled.
    """
    if not is_shared(mesh):
        return decide()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh has no part in it"
    outcome: list[Any] = [None, None]
    if not any(coordinate):
        try:
            outcome[0] = decide()
        except AutopACError as error:
            outcome[1] = error
    for axis in range(mesh.ndim):  # along one axis after the other, from where the first rank is
        dist.broadcast_object_list(outcome, group=mesh.get_group(axis), group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    decided: T = outcome[0]
    return decided


def check_same(mesh: DeviceMesh, what: str, value: str) -> None:
    """Hold that `value` is the same text on all ranks.

    Raises:
        AutopACError: on every rank, naming the ranks that differ from the first.
    """
    if not is_shared(mesh):
        return
    found = {dist.get_rank(): value}
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, found, group=group)
        for other in gathered:
            found.update(other)
    first = found[min(found)]
    if differ := sorted(rank for rank, text in found.items() if text != first):
        raise AutopACError(
            f"{what} of ranks {differ} is not that of rank {min(found)}: every rank must run the same "
            "script on the same model, inputs of the same shapes and the same settings"
        )
