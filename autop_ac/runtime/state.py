"""The state of a parallel module: sharded from whole tensors, loaded, initialised as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..sharding.apply import local_shape


def takes_whole_tensors(module: torch.nn.Module) -> None:
    """Let ``load_state_dict`` of `module`, and of each part of it, take plain tensors of global shape.

    Each rank keeps its own part of what it was given; nothing is sent. DTensors are taken as ever.
    """
    for part in module.modules():
        part.register_load_state_dict_pre_hook(_shard_in)


def _shard_in(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any, **__: Any
) -> None:
    # PyTorch hands out a copy of the user's dict
    held = {**module._parameters, **module._buffers}
    for name, own in held.items():
        given = state.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(given, torch.Tensor):
            continue
        if (
            isinstance(given, DTensor) or given.shape != own.shape
        ):  # of another shape: PyTorch's error
            continue
        whole = given.detach().to(own.device if own.device.type != "meta" else given.device)
        state[prefix + name] = distribute_tensor(
            whole, own.device_mesh, own.placements, src_data_rank=None
        )


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """This rank's part of a whole tensor, as a DTensor; what is on the meta device stays there."""
    if tensor.device.type != "meta":
        # a copy: a replicated tensor would be the model's own, and other ranks are written rank 0's into
        given = tensor.to(mesh.device_type).clone(memory_format=torch.contiguous_format)
        return distribute_tensor(given, mesh, placements)
    shape = local_shape(tensor.shape, mesh, placements)
    local = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.size(), stride=tensor.stride()
    )


def as_on_one_device(init: Callable[..., Any]) -> Callable[..., Any]:
    """An ``init_weights`` that gives, under one seed, the weights that it gives on one device."""

    def init_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _GlobalRandom():
            return init(self, *args, **kwargs)

    init_weights.__doc__ = init.__doc__
    return init_weights


class _GlobalRandom(torch.utils._python_dispatch.TorchDispatchMode):  # noqa: TID251
    """Random writes into a DTensor draw the whole tensor and keep this rank's part.

    So an initialisation under one seed gives the weights it gives on a single device, and ranks agree
    on what they share. One parameter at a time is whole in memory.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if not (seeded and isinstance(target, DTensor) and func._schema.is_mutable):
            return func(*args, **(kwargs or {}))
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(whole, *args[1:], **(kwargs or {}))
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=0)
        target.to_local().copy_(part.to_local())
        return target
