# %% [markdown]
# # A model, two processes, and activations kept or recomputed
#
# A small GPT learns bytes of Python's standard library: once on one process as it stands, once
# sharded over two by `AutoParallel`, with activation checkpointing off, in stages, and by hints.
# Run it as it is (it starts its own processes) or under `torchrun --nproc-per-node=2`.

# %%
import logging
import os
import pathlib
import sysconfig
import warnings

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autop_ac import MATMUL, AutoParallel, ac_region, launch, measure_memory

STEPS, BATCH, LENGTH, WIDTH, HEADS, LAYERS = 30, 8, 128, 128, 4, 4
console = Console()

# %% [markdown]
# ## The model
#
# An ordinary single-device module. The region in each block says: keep the results of matrix
# multiplications for backward, recompute the rest. In plain eager it does nothing.


# %%
class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ac_region("block", save=[MATMUL]):
            x = x + self.attention(self.norm1(x))
            x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# %% [markdown]
# ## The data
#
# Sources of the standard library, cut into windows; the same on every rank.


# %%
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(p.read_bytes() for p in sorted(folder.glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    made = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - LENGTH - 1, (STEPS, BATCH), generator=made)
    windows = data[starts[..., None] + torch.arange(LENGTH + 1)]
    return [(w[:, :-1], w[:, 1:]) for w in windows]


def train(model: torch.nn.Module, data: list, label: str, own: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    quiet = dist.is_initialized() and dist.get_rank() > 0
    for x, y in track(data, label, console=console, disable=quiet):
        optimizer.zero_grad()
        loss = loss_of(model(x[own]), y[own]) if own == slice(None) else model(x[own], y[own])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## Sharded
#
# The batch is split over the mesh and each rank holds half of the parameters. With `loss_fn` the
# loss is part of the graph and is that of the whole batch, so its gradients are the single-device
# ones. `configure_ac` chooses what is kept for backward.


# %%
def parallelize(mesh, **ac):
    torch.manual_seed(0)

    def example():
        return torch.randint(256, (BATCH, LENGTH)), torch.randint(256, (BATCH, LENGTH))

    ap = AutoParallel(GPT(), example, mesh, loss_fn=loss_of)
    with ap.configure_ac(**ac).configure_compile("eager"):
        ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        parallel = ap.apply_placement(ap.optimize_placement())
    return parallel, ap.ac_report


def measure(model, x, y):
    with measure_memory() as memory:
        loss = model(x, y)
        memory.mark("end of forward")
        loss.backward()
    model.zero_grad()
    return memory.peak_bytes, memory.marks["end of forward"]


def worker():
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    rank, share = dist.get_rank(), BATCH // dist.get_world_size()
    own = slice(rank * share, (rank + 1) * share)
    data = batches()
    settings = {
        "off": {"enable": False},
        "staged": {"stage_size": "auto"},
        "hints": {"stage_size": None},
    }
    memory, reports = {}, {}
    for name, ac in settings.items():
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            model, reports[name] = parallelize(mesh, **ac)
        x, y = data[0]
        measure(model, x[own], y[own])  # the first step warms allocations up
        memory[name] = measure(model, x[own], y[own])
    losses = train(model, data, "two processes", own)
    return losses, memory, {name: str(report) for name, report in reports.items()}


# %% [markdown]
# ## Side by side


# %%
def main():
    results = launch(worker, 2)
    if int(os.environ.get("RANK", "0")):
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    single = train(GPT(), batches(), "one process")
    sharded, memory, reports = results[0]
    table = Table("step", "one process", "two processes", title="loss")
    for step in (0, *range(4, STEPS, 5)):
        table.add_row(str(step), f"{single[step]:.6f}", f"{sharded[step]:.6f}")
    console.print(table)
    table = Table("checkpointing", "peak", "kept at the end of forward", title="measured, rank 0")
    for name, (peak, kept) in memory.items():
        table.add_row(name, f"{peak / 2**20:.2f} MiB", f"{kept / 2**20:.2f} MiB")
    console.print(table)
    print(reports["hints"])
    worst = max(abs(a - b) for a, b in zip(single, sharded, strict=True))
    assert worst < 1e-4, f"losses differ by {worst}"
    assert memory["off"][1] > memory["staged"][1], "stages keep less than no checkpointing"


if __name__ == "__main__":
    main()
