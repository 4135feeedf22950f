"""Time and memory of a training step: ours, FSDP2 and DDP under five policies of checkpointing.

    python tests/benchmarks/step.py [--json] [--quick] [--policies off auto] [--systems ours-eager ...]
    torchrun --nproc-per-node=N tests/benchmarks/step.py --device cuda

A GPT of 25M parameters, sequences of 256, fp32, AdamW, on two gloo processes, or on the workers of
torchrun. The systems of all policies asked for are made first, and then step in turn, so that a busy
machine is busy for all of them; a ratio is taken within a round. `peak_bytes` are the live bytes of a
whole step on the first rank, parameters and the optimizer's state included, from the allocator's own
events. Memory of the machine bounds how many cells one run may hold: some 400 MB a process for each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from autop_ac import launch, measure_memory  # noqa: E402
from tests.benchmarks.step_systems import (  # noqa: E402
    CONFIG,
    POLICIES,
    QUICK,
    SYSTEMS,
    Made,
    local_bytes,
    make,
)
from tests.gpt import mean_loss  # noqa: E402

# of these two, the first in terms of the second
COMPARED = (
    ("ours-inductor", "fsdp2-compile"),
    ("ours-eager", "fsdp2-eager"),
    ("ours-eager", "ddp"),
)
WARM_UP = 2  # steps that compile, make optimizer state and are not timed


@dataclass
class Cell:
    """A policy under a system, and what was measured of it on this rank."""

    policy: str
    system: str
    made: Made
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank measures; the rows are those of the first rank."""
    config = QUICK if asked.quick else CONFIG
    world = dist.get_world_size()
    mesh = init_device_mesh(asked.device, (world,), mesh_dim_names=("dp",))
    batch = asked.batch * world
    cells = []
    for policy in asked.policies:
        for system in asked.systems:
            if policy == "auto" and not system.startswith("ours"):
                continue  # others have no automatic part
            made = make(policy, system, config, mesh, batch)
            optimizer = torch.optim.AdamW(made.module.parameters(), lr=1e-3, eps=1e-4)
            cells.append(Cell(policy, system, made, optimizer))
    generator = torch.Generator().manual_seed(1)
    shape = (asked.steps + WARM_UP, 2, batch, config.context)
    data = torch.randint(config.vocab_size, shape, generator=generator)
    # one batch at every step: there is something to learn in it
    x, y = data[0].to(mesh.device_type).chunk(world, 1)[mesh.get_rank()]
    shuffled = random.Random(0)
    for number in range(WARM_UP + asked.steps):
        for cell in shuffled.sample(cells, len(cells)):
            _timed_step(cell, mesh, x, y, number)
    for cell in cells:
        cell.peak_bytes = _peak_bytes(cell, mesh, x, y)
    return [_row(cell, mesh) for cell in cells]


def _timed_step(cell: Cell, mesh: DeviceMesh, x: Any, y: Any, number: int) -> None:
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    loss = _step(cell, mesh, x, y)
    _finish(mesh)
    taken, cpu_taken = time.perf_counter() - start, time.process_time() - cpu
    dist.all_reduce(loss)
    cell.losses.append(loss.item() / mesh.size())
    if number == 0:
        cell.made.parts_s["first_step_s"] = taken
    if number >= WARM_UP:
        cell.step_s.append(taken)
        cell.cpu_s.append(cpu_taken)


def _step(cell: Cell, mesh: DeviceMesh, x: Any, y: Any) -> torch.Tensor:
    loss = mean_loss(cell.made.module(x), y)
    # outputs of ours are local: each rank counts its own part of the batch fully; FSDP2 and DDP average
    (loss / mesh.size() if cell.system.startswith("ours") else loss).backward()
    cell.optimizer.step()
    cell.optimizer.zero_grad()
    return loss.detach().clone()


def _finish(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _peak_bytes(cell: Cell, mesh: DeviceMesh, x: Any, y: Any) -> int:
    held = local_bytes(cell.made.module)
    for state in cell.optimizer.state.values():
        for value in state.values():
            part = value.to_local() if isinstance(value, DTensor) else value
            held += part.numel() * part.element_size()
    _finish(mesh)
    if mesh.device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _step(cell, mesh, x, y)
        return held + torch.cuda.max_memory_allocated() - before
    with measure_memory() as measured:
        _step(cell, mesh, x, y)
        _finish(mesh)
    return held + measured.peak_bytes


def _row(cell: Cell, mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "policy": cell.policy,
        "system": cell.system,
        "step_s": statistics.median(cell.step_s),
        "cpu_s": statistics.median(cell.cpu_s),
        "peak_bytes": cell.peak_bytes,
        "predicted_bytes": cell.made.predicted_bytes,
        "losses": cell.losses,
        "steps_s": cell.step_s,
        "parts_s": {name: round(s, 3) for name, s in cell.made.parts_s.items()},
        "device": mesh.device_type,
        "world": mesh.size(),
    }


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """The median of the ratios, and the 95% interval of it by bootstrap."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws)
    )
    return statistics.median(ratios), medians[draws // 40], medians[-draws // 40]


def compared(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of time and peak bytes, ours to the others, by policy; ours "auto" to each of theirs."""
    by_cell = {(row["policy"], row["system"]): row for row in rows}
    found = []
    for ours, other in COMPARED:
        for (policy, system), row in by_cell.items():
            against = [p for p in POLICIES if p == policy or policy == "auto"]
            for theirs in against if system == ours else ():
                if (theirs, other) not in by_cell:
                    continue
                base = by_cell[theirs, other]
                pairs = zip(row["steps_s"], base["steps_s"], strict=True)
                middle, low, high = interval([a / b for a, b in pairs])
                losses = zip(row["losses"], base["losses"], strict=True)
                found.append({
                    "policy": policy,
                    "system": ours,
                    "against": f"{other} {theirs}",
                    "time": round(middle, 3),
                    "low": round(low, 3),
                    "high": round(high, 3),
                    "peak": round(row["peak_bytes"] / base["peak_bytes"], 3),
                    "loss_difference": max(abs(a - b) for a, b in losses),
                })  # fmt: skip
    return found


def _table(rows: Sequence[dict[str, Any]], say: Callable[[str], None]) -> None:
    if not rows:
        return
    cells = [[str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip([*rows[0]], *cells, strict=True)]
    for line in ([*rows[0]], *cells):
        say("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def main() -> None:
    """Print the tables, or with ``--json`` an object a line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, default=2, help="processes, without torchrun")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each process")
    parser.add_argument("--steps", type=int, help="timed steps; 20, or 3 with --quick")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    asked = parser.parse_args()
    if asked.device == "cuda" and "RANK" not in os.environ:
        parser.error("--device cuda: start it by torchrun --nproc-per-node=N, which NCCL needs")
    asked.steps = asked.steps or (3 if asked.quick else 20)
    (rows, *_) = launch(run, asked.nproc, asked, timeout_s=7200)
    if os.environ.get("RANK", "0") != "0":
        return  # a worker of torchrun that is not the first
    if asked.json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    short = [
        {
            "policy": row["policy"],
            "system": row["system"],
            "step_s": round(row["step_s"], 4),
            "cpu_s": round(row["cpu_s"], 4),
            "peak_MiB": round(row["peak_bytes"] / 2**20, 1),
            "parts": " ".join(f"{n} {s:.1f}" for n, s in row["parts_s"].items()),
        }
        for row in rows
    ]
    _table(short, print)
    print()
    _table(compared(rows), print)


if __name__ == "__main__":
    main()
