"""The parallel module trains as the single-process one: real gloo processes, gradients compared."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from autop_ac import MATMUL, AutoParallel, ac_region, launch, measure_memory
from tests.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=64, dim=32, heads=4, layers=2, context=16)
BATCH = 8


class HintedBlocks(GPT):
    """The GPT with a region around each block."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            with ac_region("block", save=[MATMUL]):
                x = block(x)
        return self.head(x)


def tokens():
    return torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.context))


def mean_loss(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def reference(model, x, y):
    loss = mean_loss(model(x), y)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def assert_gradients_equal(expected, parallel, scale=1.0):
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, parameter in parallel.named_parameters():
        got = parameter.grad.full_tensor() * scale
        bound = 1e-5 * expected[name].norm() + 1e-8 * norm
        assert (got - expected[name]).norm() <= bound, name


def train(shape, ac, backend, loss_way, model_class):
    """One step on each rank against the single-process model; gives the report as a dict."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    model = model_class(CONFIG)
    x, y = tokens(), tokens()
    loss, gradients = reference(model, x, y)
    model.zero_grad()
    in_graph = loss_way == "loss_fn"
    ap = AutoParallel(
        model,
        (lambda: (tokens(), tokens())) if in_graph else tokens,
        mesh,
        loss_fn=mean_loss if in_graph else None,
    )
    ap.configure_ac(**ac).configure_compile(backend)
    batch = (Shard(0), *[Replicate()] * (len(shape) - 1))
    with ap:
        ap.add_input_constraints([batch, batch] if in_graph else [batch])
        if not in_graph:
            ap.add_output_constraints([batch])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        parallel = ap.apply_placement(
            ap.optimize_placement(), outputs="dtensor" if loss_way == "dtensor" else "local"
        )
    assert type(parallel).__mro__[1] is model_class
    total = sum(p.numel() * p.element_size() for p in parallel.parameters())
    local = sum(p.to_local().numel() * p.element_size() for p in parallel.parameters())
    assert local <= 1.05 * total / mesh.size()
    dp, rank = shape[0], mesh.get_coordinate()[0]
    own = slice(rank * BATCH // dp, (rank + 1) * BATCH // dp)
    if loss_way == "loss_fn":
        got = parallel(x[own], y[own])
    elif loss_way == "dtensor":
        from torch.distributed.tensor import DTensor

        logits = parallel(x[own])
        target = DTensor.from_local(y[own], mesh, batch)
        got = mean_loss(logits, target)
    else:
        got = mean_loss(parallel(x[own]), y[own])
    got.backward()
    scale = 1 / dp if loss_way == "local" else 1.0
    assert_gradients_equal(gradients, parallel, scale)
    if loss_way == "loss_fn":
        assert abs(got.item() - loss) < 1e-5
    return ap.ac_report.to_dict()


@pytest.mark.parametrize("loss_way", ["local", "dtensor", "loss_fn"])
@pytest.mark.parametrize(
    ("ac", "model_class"),
    [
        ({"enable": False}, GPT),
        ({"stage_size": "auto"}, GPT),
        ({"stage_size": None}, HintedBlocks),
    ],
    ids=["off", "staged", "hinted"],
)
def test_two_processes_give_the_single_process_gradients(ac, model_class, loss_way):
    launch(train, 2, (2,), ac, "eager", loss_way, model_class)


def test_four_processes_on_a_two_by_two_mesh_give_the_single_process_gradients():
    launch(train, 4, (2, 2), {"stage_size": "auto"}, "eager", "local", GPT)


def fifty_steps(ac):
    """Losses of 50 optimizer steps, single-process and parallel."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, x, y = HintedBlocks(CONFIG), tokens(), tokens()
    ap = AutoParallel(model, lambda: (tokens(), tokens()), mesh, loss_fn=mean_loss)
    with ap.configure_ac(**ac).configure_compile("eager"):
        ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        ap.add_parameter_memory_constraint(0.0, 0.5)
        parallel = ap.apply_placement(ap.optimize_placement())
    own = slice(mesh.get_rank() * BATCH // 2, (mesh.get_rank() + 1) * BATCH // 2)

    def losses(module, step):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        got = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = step(module)
            loss.backward()
            optimizer.step()
            got.append(loss.item())
        return got

    sharded = losses(parallel, lambda m: m(x[own], y[own]))
    return losses(model, lambda m: mean_loss(m(x), y)), sharded


@pytest.mark.parametrize("ac", [{"enable": False}, {"stage_size": "auto"}, {"stage_size": None}])
def test_the_losses_of_fifty_steps_are_those_of_one_process(ac):
    single, sharded = launch(fifty_steps, 2, ac)[0]
    assert single[-1] < single[0]
    assert max(abs(a - b) for a, b in zip(single, sharded, strict=True)) < 1e-4


def test_inductor_gives_the_single_process_gradients_on_two_processes():
    launch(train, 2, (2,), {"stage_size": "auto"}, "inductor", "local", GPT)


def peaks(ac):
    """Predicted and measured peak bytes of a step, eager.

    One process: gloo's own threads let go of gathered weights at a time of their choosing.
    """
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    config = GPTConfig(vocab_size=256, dim=64, heads=4, layers=4, context=64)

    def inputs():
        return torch.randint(256, (16, 64)), torch.randint(256, (16, 64))

    ap = AutoParallel(HintedBlocks(config), inputs, mesh, loss_fn=mean_loss)
    with ap.configure_ac(**ac).configure_compile("eager"):
        parallel = ap.apply_placement(ap.optimize_placement())
    x, y = inputs()
    with measure_memory() as memory:
        parallel(x, y).backward()
    static = sum(p.to_local().numel() * p.element_size() for p in parallel.parameters())
    return ap.ac_report.peak_bytes, static + memory.peak_bytes


@pytest.mark.parametrize("ac", [{"enable": False}, {"stage_size": "auto"}, {"stage_size": None}])
def test_the_predicted_peak_is_within_five_percent_of_the_measured_one(ac):
    predicted, measured = launch(peaks, 1, ac)[0]
    assert abs(predicted - measured) <= 0.05 * measured
