"""Loading: whole tensors, as a checkpoint of one device has them, into parameters that are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


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
