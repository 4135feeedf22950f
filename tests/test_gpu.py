"""Training on the device: gradients, predicted peaks and settings, the same tests on CPU and on GPUs.

    pytest -m gpu                                                     # one GPU, a mesh of one device
    torchrun --nproc-per-node=2 -m pytest -n 0 -m gpu tests/test_gpu.py   # two, over NCCL

Without a GPU those marked `gpu` are skipped, and the same functions run on the CPU; under torchrun
over gloo, where `-k cpu` is asked for.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from autop_ac import AutoParallel, measure_memory
from tests.gpt import GPT, GPTConfig, HintedGPT, mean_loss
from tests.test_api import settings

CONFIG = GPTConfig(vocab_size=128, dim=128, heads=2, layers=2, context=64, tied=False)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
)  # fmt: skip
OPERATORS = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
_starts = iter(range(1000))


@pytest.fixture
def mesh(request):
    """A mesh of the workers of torchrun, or of this process alone, on the device that is asked for."""
    device = request.getfixturevalue("device")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world == 1:
        store = dist.HashStore()
    else:  # torchrun's own store, a part of it for each test
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"test {next(_starts)}", store)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return init_device_mesh(device, (world,), mesh_dim_names=("dp",))


def model_and_batch(mesh, dtype, model_class=GPT):
    """On every rank the same weights, and the same batch over all ranks."""
    torch.manual_seed(0)
    model = model_class(CONFIG).to(mesh.device_type, dtype)
    x, y = torch.randint(128, (2, 4 * mesh.size(), CONFIG.context)).to(mesh.device_type)
    return model, x, y


def parallelized(mesh, model, x, y, backend, **ac):
    ap = AutoParallel(model, lambda: (x, y), mesh, loss_fn=mean_loss)
    with ap.configure_compile(backend).configure_ac(**ac):
        ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        ap.add_parameter_memory_constraint()
        return ap, ap.apply_placement(ap.optimize_placement())


CASES = [
    ("cpu", FLASH, torch.float32, "eager"),
    *[
        pytest.param("cuda", kernel, dtype, backend, marks=pytest.mark.gpu)
        for kernel, dtype in ((FLASH, torch.bfloat16), (EFFICIENT, torch.float32), (CUDNN, torch.bfloat16))
        for backend in ("eager", "inductor")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("device", "kernel", "dtype", "backend"), CASES, ids=str)
def test_gradients_are_the_single_device_ones_and_settings_as_before(
    mesh, device, kernel, dtype, backend
):
    model, x, y = model_and_batch(mesh, dtype)
    before = settings()
    with sdpa_kernel([kernel]):
        expected = mean_loss(model(x), y)
        expected.backward()
        ap, parallel = parallelized(mesh, model, x, y, backend)
    targets = [str(n.target) for n in ap._joint.module.graph.nodes]
    assert any(OPERATORS[kernel] in t for t in targets)
    rank = mesh.get_rank()
    loss = parallel(x.chunk(mesh.size())[rank], y.chunk(mesh.size())[rank])
    loss.backward()
    assert settings() == before
    # sums run in another order, in bf16 with eight bits
    rel = 1e-4 if dtype is torch.float32 else 5e-2
    assert loss.item() == pytest.approx(expected.item(), rel=rel)
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    for (name, p), own in zip(parallel.named_parameters(), model.parameters(), strict=True):
        difference = (p.grad.full_tensor() - own.grad).float().norm()
        assert difference <= rel * own.grad.float().norm() + 0.1 * rel * norm, name


def measured_peak(device, step):
    """Bytes alive at most, beyond those of before; by the allocator's events, and by its own count."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with measure_memory(device) as memory:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    found = [memory.peak_bytes]
    if device == "cuda":
        found.append(torch.cuda.max_memory_allocated() - before)
    return found


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("model_class", [GPT, HintedGPT])
def test_the_measured_peak_is_within_five_percent_of_the_predicted_one(mesh, device, model_class):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, x, y = model_and_batch(mesh, dtype, model_class)
    ap, parallel = parallelized(mesh, model, x, y, "eager", stage_size=None)
    own = [t.chunk(mesh.size())[mesh.get_rank()].clone() for t in (x, y)]

    def step():
        parallel(*own).backward()
        parallel.zero_grad()

    step()  # workspaces of libraries are made at the first step
    static = sum(p.to_local().nbytes for p in parallel.parameters()) + sum(t.nbytes for t in own)
    predicted = ap.ac_report.peak_bytes
    for peak in measured_peak(device, step):
        assert static + peak >= 0.95 * predicted
        if device == "cuda" or mesh.size() == 1:  # gloo takes scratch memory
            assert static + peak <= 1.05 * predicted


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_gathers_ahead_and_other_sizes_give_the_single_device_losses_of_some_steps(mesh, device):
    model, x, y = model_and_batch(mesh, torch.float32)
    ap = AutoParallel(model, lambda: (x, y), mesh, loss_fn=mean_loss, dynamic=True)
    ap.configure_comm(all_gather_bucket="1 MiB", prefetch=True).configure_compile("eager")
    parallel = ap.parallelize(parameter_memory=1 / mesh.size())
    losses = []
    for module in (model, parallel):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        for number in range(4):
            rows = x.shape[0] // (1 + number % 2)
            batch = (x[:rows], y[:rows])
            if module is parallel:
                batch = [t.chunk(mesh.size())[mesh.get_rank()] for t in batch]
            loss = module(*batch) if module is parallel else mean_loss(module(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)
