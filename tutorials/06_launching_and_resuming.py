# %% [markdown]
# # Launching with torchrun, and resuming from a checkpoint
#
# As it is, with two worker processes that it starts itself:
#
#     python tutorials/06_launching_and_resuming.py
#
# and started by torchrun, on one machine or several:
#
#     torchrun --nproc-per-node 2 tutorials/06_launching_and_resuming.py
#     torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ...
#
# The script trains, saves by `torch.distributed.checkpoint` half-way, and goes on. Then other processes, on
# another mesh, load the checkpoint and go on from there; so does the model on one device. All end with the same
# losses.

# %%
import importlib
import shutil
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autop_ac import AutoParallel, launch

STEPS, HALF = 6, 3
BATCH, DIM, CLASSES = 16, 32, 8

# %% [markdown]
# ## The model and its data
#
# Data are made from the number of the step, so that a run that is resumed sees what it would have seen. With
# files, save the sampler's state beside the model's.


# %%
class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.norm = torch.nn.LayerNorm(4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, DIM, generator=draw)
    return x, torch.randint(CLASSES, (BATCH,), generator=draw)


# %% [markdown]
# ## Parallel
#
# Every rank runs the same script on the same model, with inputs of the same shapes and the same settings. With
# `loss_fn` the loss is that of the whole batch.


# %%
def parallel_model() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ap = AutoParallel(make_model(), lambda: batch(0), mesh, loss_fn=F.cross_entropy)
    with ap.configure_compile("eager").configure_progress(False):
        ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        return ap.apply_placement(ap.optimize_placement())


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].clone()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x, target = batch(step)
        loss = model(own_rows(x), own_rows(target))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## Saving and loading
#
# The state of a parallel module has the names of your own model, and DTensors, which
# `torch.distributed.checkpoint` cuts anew for another mesh. `get_state_dict` and `set_state_dict` take the
# optimizer along.


# %%
def save(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


# %% [markdown]
# ## Work of one process
#
# `launch` runs these once in each worker. A worker imports this file, so that what it calls stands at the top
# level, and what starts it under `if __name__ == "__main__":`.


# %%
def shared_folder() -> str:
    """One folder for all ranks; on several machines it is on a disk that they share."""
    made = [tempfile.mkdtemp(prefix="autop_ac_tutorial_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return str(made[0])


def first_run() -> dict[str, Any]:
    """Train, save half-way, go on."""
    folder = shared_folder()
    model = parallel_model()
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, range(HALF))
    save(folder, model, optimizer)
    names = list(model.state_dict())
    losses += train(model, optimizer, range(HALF, STEPS))
    return {"names": names, "losses": losses, "folder": folder, "rank": dist.get_rank()}


def second_run(folder: str) -> dict[str, Any]:
    """Begin from the checkpoint, on however many processes there are."""
    model = parallel_model()
    optimizer = make_optimizer(model)
    load(folder, model, optimizer)
    return {
        "processes": dist.get_world_size(),
        "losses": train(model, optimizer, range(HALF, STEPS)),
    }


def on_one_device(folder: str | None = None) -> list[float]:
    """Without autop_ac: from the start, or from the checkpoint of the parallel run."""
    model = make_model()
    optimizer = make_optimizer(model)
    if folder is not None:
        state = {"model": model.state_dict()}
        with warnings.catch_warnings():  # that there is no process group, as is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(state["model"])
        return [F.cross_entropy(model(batch(HALF)[0]), batch(HALF)[1]).item()]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = batch(step)
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# ## All of it
#
# Under torchrun both runs are on torchrun's processes, whatever the number given to `launch`. A notebook's own
# functions cannot be imported by new processes: there the ones of this file are taken, beside which the notebook
# lies.


# %%
def importable(name: str) -> Any:
    if "__file__" in globals():
        return globals()[name]
    return getattr(importlib.import_module("06_launching_and_resuming"), name)


def main() -> None:
    first = launch(importable("first_run"), 2)[0]
    second = launch(importable("second_run"), 4, first["folder"])[0]
    if first["rank"] != 0:  # under torchrun, rank 0 alone goes on
        return
    alone = on_one_device(first["folder"])
    shutil.rmtree(first["folder"])
    reference = on_one_device()
    for step, loss in enumerate(reference):
        print(f"step {step}: loss {loss:.6f}, two processes {first['losses'][step]:.6f}")
    print(f"resumed on {second['processes']} processes: {second['losses']}")
    assert first["names"] == list(make_model().state_dict()), "names are those of the model"
    torch.testing.assert_close(first["losses"], reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second["losses"], reference[HALF:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, reference[HALF : HALF + 1], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
