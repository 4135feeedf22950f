"""The systems and policies that `step.py` compares: one model, made to run in each of five ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autop_ac import AutoParallel
from tests.gpt import GPT, GPTConfig

SYSTEMS = ("fsdp2-eager", "fsdp2-compile", "ddp", "ours-eager", "ours-inductor")
POLICIES = ("off", "full", "second", "attention", "auto")
CONFIG = GPTConfig(vocab_size=6144, dim=512, heads=8, layers=6, context=256, tied=False)
QUICK = GPTConfig(vocab_size=128, dim=32, heads=4, layers=2, context=32, tied=False)

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default}


class Checkpointed(torch.nn.Module):
    """A part of a model under `torch.utils.checkpoint`, selective where `context_fn` is given."""

    def __init__(self, part: torch.nn.Module, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.part = part
        self.more = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=False, **self.more)


def _second_matmuls() -> Any:
    """Contexts that keep the first, third, ... product of the part; recomputation counts anew."""
    counts = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op not in _MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        kept = counts[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def model_of(policy: str, config: GPTConfig) -> GPT:
    """The model with the checkpoints of a policy in it, the same for every system."""
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    blocks = model.blocks
    for i, block in enumerate(blocks):
        if policy == "full":
            blocks[i] = Checkpointed(block)
        elif policy == "second":
            blocks[i] = Checkpointed(block, _second_matmuls)
        elif policy == "attention":
            block.attention = Checkpointed(block.attention)
    return model


@dataclass
class Made:
    """A module to train, the seconds of each part of making it, and the peak that was predicted."""

    module: torch.nn.Module
    parts_s: dict[str, float]
    predicted_bytes: int | None = None


def make(policy: str, system: str, config: GPTConfig, mesh: DeviceMesh, batch: int) -> Made:
    """The module of a cell of the table, on this rank.

    Args:
        batch: sequences over all ranks.
    """
    model = model_of(policy, config).to(mesh.device_type)
    name, _, how = system.partition("-")
    start = time.perf_counter()
    if name == "ours":
        return _ours(model, policy, how, config, mesh, batch)
    if name == "ddp":
        index = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
        made: torch.nn.Module = DistributedDataParallel(
            model, index, process_group=mesh.get_group(0), gradient_as_bucket_view=True
        )
    else:
        for block in model.blocks:
            if how == "compile":
                block.compile()
            fully_shard(block, mesh=mesh)
        made = fully_shard(model, mesh=mesh)
    return Made(made, {"wrap_s": time.perf_counter() - start})


def _ours(
    model: GPT, policy: str, how: str, config: GPTConfig, mesh: DeviceMesh, batch: int
) -> Made:
    shape = (batch, config.context)
    inputs = partial(torch.zeros, shape, dtype=torch.int64, device="meta")
    ac: dict[str, Any] = {"off": {"enable": False}, "auto": {}}.get(policy, {"stage_size": None})
    ap = AutoParallel(model, inputs, mesh).configure_ac(**ac)
    ap.configure_compile(how)  # type: ignore[arg-type]
    times = [time.perf_counter()]
    with ap:
        times.append(time.perf_counter())
        ap.add_input_constraints([(Shard(0),)])
        ap.add_output_constraints([(Shard(0),)])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        plan = ap.optimize_placement()
        times.append(time.perf_counter())
        module = ap.apply_placement(plan)
    times.append(time.perf_counter())
    parts = zip(("capture_s", "search_s", "apply_s"), times, times[1:], strict=False)
    return Made(module, {n: b - a for n, a, b in parts}, ap.ac_report.peak_bytes)


def local_bytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(p.numel() * p.element_size() for p in parts)
