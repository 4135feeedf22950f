"""Checkpoints: from one mesh to another and to one process, and after a worker was killed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autop_ac import AutoParallel, WorkerError, fake_mesh, launch
from tests.gpt import GPT, GPTConfig, mean_loss

CONFIG = GPTConfig(vocab_size=64, dim=16, heads=2, layers=1, context=8)
BATCH = 8


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (2, BATCH, CONFIG.context), generator=generator)


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def single_model():
    torch.manual_seed(0)
    return GPT(CONFIG)


def parallel_model(shape, model=None):
    """The model over a mesh, and a function of a step that gives the loss of the whole batch."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    batch = (Shard(0), *[Replicate()] * (mesh.ndim - 1))
    ap = AutoParallel(
        model or single_model(), lambda: tuple(data(0)), mesh, loss_fn=mean_loss
    ).configure_compile("eager")
    with ap:
        ap.add_input_constraints([batch, batch])
        ap.add_parameter_memory_constraint()
        module = ap.apply_placement(ap.optimize_placement())
    own = slice(*(BATCH * (mesh.get_coordinate()[0] + i) // shape[0] for i in (0, 1)))
    return module, lambda step: module(*(part[own] for part in data(step)))


def trained(optimizer, loss_of, steps):
    """Losses of the steps, each before its update."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one_device(model):
    return lambda step: mean_loss(model(data(step)[0]), data(step)[1])


def save(folder, module, optimizer):
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder, module, optimizer):
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def saved_on_one_mesh_and_loaded_on_another(folder):
    module, loss_of = parallel_model((4,))
    optimizer = optimizer_of(module)
    first = trained(optimizer, loss_of, range(2))
    save(folder, module, optimizer)
    undisturbed = trained(optimizer, loss_of, range(2, 4))
    other, loss_of = parallel_model((2, 2))
    other_optimizer = optimizer_of(other)
    load(folder, other, other_optimizer)
    return first, undisturbed, trained(other_optimizer, loss_of, range(2, 4))


# dcp tells that there is no process group, which is what is tested here
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")
def test_a_checkpoint_of_four_goes_on_on_two_by_two_and_on_one_process(tmp_path):
    first, undisturbed, on_two_axes = launch(
        saved_on_one_mesh_and_loaded_on_another, 4, str(tmp_path)
    )[0]
    model = single_model()
    optimizer = optimizer_of(model)
    assert trained(optimizer, one_device(model), range(2)) == pytest.approx(first, abs=1e-5)
    alone = single_model()
    alone_optimizer = optimizer_of(alone)
    load(str(tmp_path), alone, alone_optimizer)
    on_one = trained(alone_optimizer, one_device(alone), range(2, 4))
    assert on_two_axes == pytest.approx(undisturbed, abs=1e-5)
    assert on_one == pytest.approx(undisturbed, abs=1e-5)
    # with fresh moments, or fresh weights, the losses are others
    assert trained(optimizer_of(alone), one_device(alone), range(4, 6)) != pytest.approx(
        trained(optimizer, one_device(model), range(4, 6)), abs=1e-5
    )


def plain_state_into_shards(folder):
    plain = torch.load(os.path.join(folder, "plain.pt"))
    module, loss_of = parallel_model((2,))
    expected = {n: t.clone() for n, t in plain.items()}
    missing = module.load_state_dict(plain)
    assert not missing.missing_keys and not missing.unexpected_keys
    assert list(module.state_dict()) == list(expected)
    for name, tensor in module.state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    assert all(type(t) is torch.Tensor for t in plain.values()), "the user's dict was changed"
    own = {n: t.clone() for n, t in module.state_dict().items()}
    optimizer = optimizer_of(module)
    trained(optimizer, loss_of, range(1))
    module.load_state_dict(own)  # its own, as DTensors
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
    with torch.device("meta"):
        empty = GPT(CONFIG)
    from_meta, _ = parallel_model((2,), empty)
    from_meta.to_empty(device="cpu")
    from_meta.load_state_dict(plain)
    for name, tensor in from_meta.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name


def test_a_plain_checkpoint_of_one_device_is_sharded_in(tmp_path):
    model = single_model()
    trained(optimizer_of(model), one_device(model), range(2))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    launch(plain_state_into_shards, 2, str(tmp_path))


def test_a_checkpoint_that_does_not_fit_is_refused_as_by_any_module():
    ap = AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(2, 4), fake_mesh(1))
    parallel = ap.configure_compile("eager").parallelize()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        parallel.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(4)})
    with pytest.raises(RuntimeError, match='Missing key.*"bias"'):
        parallel.load_state_dict({"weight": torch.ones(4, 4)})


def initialised(shape):
    with torch.device("meta"):
        model = GPT(CONFIG)
    module, _ = parallel_model(shape, model)
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.init_weights()
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def test_a_meta_model_is_initialised_to_the_weights_of_one_device():
    torch.manual_seed(3)
    single = GPT(CONFIG)
    torch.manual_seed(3)
    single.init_weights()
    for found in launch(initialised, 2, (2,)):
        for name, parameter in single.named_parameters():
            assert torch.equal(found[name], parameter), name


STEPS = 5


def resumed(folder, dies_at):
    """Train to the end from the last checkpoint; rank 1 is killed before a step, if so asked."""
    module, loss_of = parallel_model((2,))
    optimizer = optimizer_of(module)
    done = sorted(int(name) for name in os.listdir(folder))
    start = done[-1] if done else 0
    if start:
        load(os.path.join(folder, str(start)), module, optimizer)
    losses = []
    for step in range(start, STEPS):
        if step == dies_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += trained(optimizer, loss_of, [step])
        save(os.path.join(folder, str(step + 1)), module, optimizer)
        dist.barrier()
    return start, losses


def test_a_run_whose_worker_was_killed_resumes_and_ends_as_an_undisturbed_one(tmp_path):
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    with pytest.raises(WorkerError):
        launch(resumed, 2, str(tmp_path / "killed"), 3)
    (start, rest), _ = launch(resumed, 2, str(tmp_path / "killed"), None)
    (zero, losses), _ = launch(resumed, 2, str(tmp_path / "whole"), None)
    assert (zero, start) == (0, 3)
    assert rest == losses[start:]
