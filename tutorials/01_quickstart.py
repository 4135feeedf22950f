# %% [markdown]
# # Quickstart: shard a small GPT over two processes, and keep its memory down
#
# Run it as it is, on a laptop without a GPU:
#
#     python tutorials/01_quickstart.py
#
# It starts two worker processes by itself. On a cluster, start the same file by torchrun:
#
#     torchrun --nproc-per-node 2 tutorials/01_quickstart.py
#
# It trains one model twice on the source code of Python's own library, byte by byte: on one process
# without autop_ac, and sharded over two. The losses agree. Then it measures the memory of one
# training step with activation checkpointing (AC) off, in stages, and by hints in the model.

# %%
import importlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autop_ac import (
    MATMUL,
    AutoParallel,
    ShardingPlan,
    ac_region,
    launch,
    measure_memory,
    plan_table,
)

STEPS, BATCH, LENGTH = 30, 16, 128
LAYERS, DIM, HEADS = 4, 128, 4
VOCABULARY = 256  # bytes

# %% [markdown]
# ## The model
#
# An ordinary module, written for one device. The one thing added is the `ac_region` in each block:
# results of matrix products are kept for backward, everything else in the block is computed again.
# It is a hint: what comes of it is decided when the model is parallelised.


# %%
class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(DIM)
        self.query_key_value = torch.nn.Linear(DIM, 3 * DIM)
        self.project = torch.nn.Linear(DIM, DIM)
        self.norm2 = torch.nn.LayerNorm(DIM)
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, HEADS, DIM // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(out.transpose(1, 2).reshape(batch, length, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("block", save=[MATMUL]):
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, DIM)
        self.positions = torch.nn.Embedding(LENGTH, DIM)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(DIM)
        self.unembed = torch.nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.norm(x))


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model() -> GPT:
    """The same weights in every process and every run."""
    torch.manual_seed(0)
    return GPT()


# %% [markdown]
# ## The data
#
# Bytes of the standard library, which every Python has. All processes draw the same batches, and
# each takes its own rows of them.


# %%
def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw).tolist()
        yield (
            torch.stack([data[i : i + LENGTH] for i in starts]),
            torch.stack([data[i + 1 : i + LENGTH + 1] for i in starts]),
        )


# %% [markdown]
# ## The reference: one process, no sharding


# %%
def train_plain() -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in bar(batches(STEPS), "one process"):
        optimizer.zero_grad()
        loss = mean_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## Sharded over all processes
#
# `input_fn` makes inputs in global shapes. The constraints say that the batch is sharded over the mesh,
# and that a process holds at most its share of the parameters; where each tensor lies is then searched.
# With `loss_fn` the loss is part of the graph, and it is the mean over the whole batch.


# %%
def input_fn() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (BATCH, LENGTH)
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


def make_plan() -> tuple[AutoParallel, ShardingPlan]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    builder = AutoParallel(make_model(), input_fn, mesh, loss_fn=mean_loss)
    builder.configure_compile("eager")  # no compiler: what runs is the plan, node by node
    with builder:
        builder.add_input_constraints([(Shard(0),), (Shard(0),)])
        builder.add_parameter_memory_constraint(0.0, 1.0 / mesh.size())
        return builder, builder.optimize_placement()


def own_rows(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].clone()


def train_parallel(builder: AutoParallel, plan: ShardingPlan) -> list[float]:
    model = builder.configure_ac(stage_size="auto").apply_placement(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in bar(batches(STEPS), f"{dist.get_world_size()} processes"):
        optimizer.zero_grad()
        loss = model(own_rows(tokens), own_rows(targets))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## What activation checkpointing saves
#
# The same plan applied three times; only `configure_ac` differs. `measure_memory` counts the bytes that
# PyTorch really allocates in this process.

# %%
SETTINGS: dict[str, dict[str, Any]] = {
    "AC off": {"enable": False},
    "stages": {"stage_size": "auto"},
    "hints": {"stage_size": None},
}


def measure(model: torch.nn.Module) -> tuple[int, int]:
    tokens, targets = map(own_rows, next(batches(1)))
    model(tokens, targets).backward()  # what only the first step allocates is not counted
    model.zero_grad()
    with measure_memory() as memory:
        loss = model(tokens, targets)
        time.sleep(0.05)  # threads of gloo drop the last gathered weights a moment after their use
        memory.mark("end of forward")
        loss.backward()
    return memory.peak_bytes, memory.kept_bytes


# %% [markdown]
# ## Work of one process
#
# `launch` runs this function once in each worker. Only rank 0 shows a progress bar.


# %%
def bar(steps: Iterator[Any], text: str) -> Iterator[Any]:
    console = Console(file=sys.stderr)
    hidden = dist.is_initialized() and dist.get_rank() != 0
    return iter(track(steps, text, STEPS, console=console, transient=True, disable=hidden))


def work() -> dict[str, Any]:
    plain = train_plain() if dist.get_rank() == 0 else []
    builder, plan = make_plan()
    sharded = train_parallel(builder, plan)
    memory = []
    for name, settings in SETTINGS.items():
        model = builder.configure_ac(**settings).apply_placement(plan)
        memory.append((name, *measure(model), builder.ac_report.kept_bytes))
    return {
        "plain": plain,
        "sharded": sharded,
        "memory": memory,
        "report": str(builder.ac_report),
        "plan": plan_table(plan),
    }


# %% [markdown]
# ## Results


# %%
def show(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    losses = Table("step", "loss, one process", "loss, sharded", title="The same training")
    pairs = list(zip(result["plain"], result["sharded"], strict=True))
    for step in sorted({*range(0, STEPS, 5), STEPS - 1}):
        losses.add_row(str(step), *(f"{loss:.6f}" for loss in pairs[step]))
    console.print(losses)
    worst = max(abs(a - b) for a, b in pairs)
    console.print(f"largest difference of the losses: {worst:.1e}\n")
    memory = Table(
        "setting", "peak", "kept at the end of forward", "kept, predicted",
        title="Bytes of one training step on one process, measured",
    )  # fmt: skip
    for name, *counts in result["memory"]:
        memory.add_row(name, *(f"{count:,}" for count in counts))
    console.print(memory)
    print("\nWhere the parameters lie:\n", result["plan"], sep="\n")
    print("\nThe report of the setting with hints:\n", result["report"], sep="\n")


def main() -> None:
    # new processes cannot import a notebook: there it is the `work` of this file, beside which it lies
    script = "__file__" in globals()
    worker = work if script else importlib.import_module("01_quickstart").work
    result = launch(worker, 2)[0]
    if result["plain"]:  # under torchrun, rank 0 alone
        show(result)


if __name__ == "__main__":
    main()
