"""Small models that sharding can get wrong, each against itself on one process: values and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from autop_ac import AutoParallel, CaptureError, UsageError, fake_mesh, launch

BATCH = 4


class Gathers(nn.Module):
    """`gather` whose index has fewer rows, or fewer columns, than what it reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        rows = (torch.arange(16).view(2, 8) * 3) % 8
        columns = (torch.arange(8).view(2, 4) * 3) % 4
        picked = y.gather(1, rows).sum(0) + y.gather(0, columns.expand(2, 4)).sum()
        spread = torch.zeros(4, 8).scatter_add(1, rows, y.sin()[:2])
        return y.cos() + picked + spread


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8, scale_grad_by_freq=True)

    def forward(self, x):
        return self.table((x.abs() * 10).long() % 4).sum(1)


class Inner(nn.Module):
    """A mean loss inside of the model, of every kind that divides by what it sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y, t = self.linear(x), torch.sigmoid(x)
        total = F.mse_loss(y, t) + F.smooth_l1_loss(y, t) + F.huber_loss(y, t)
        total = total + F.binary_cross_entropy(torch.sigmoid(y), t)
        total = total + F.soft_margin_loss(y, t.sign()) + F.l1_loss(y, t) + F.kl_div(y, t)
        return y.sin() + total


class OneHot(Inner):
    def forward(self, x):
        y = self.linear(x)
        return F.one_hot(y.argmax(1), 8) * y


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.layer(x.unflatten(1, (2, 4)).repeat(1, 1, 2))
        return self.attention(x, x, x, need_weights=False)[0]


MODELS = {
    "gather": Gathers,
    "embedding": Counts,
    "losses": Inner,
    "one hot": OneHot,
    "encoder": Encoder,
}
LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "cross entropy": F.cross_entropy,
}
SETTINGS = [{"enable": False}, {}, {"stage_size": None, "rules": ["**=recompute"]}]


def assert_same(parallel, model, what):
    for (name, a), b in zip(parallel.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            a.grad.full_tensor(),
            b.grad,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda m, n=name: f"{what} {n} {m}",
        )


def run_models(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    batch = (Shard(0), *[Replicate()] * (len(shape) - 1))
    for name, make in MODELS.items():
        torch.manual_seed(0)
        source, x = make(), torch.randn(BATCH, 8)
        for settings in SETTINGS:
            model = copy.deepcopy(source)
            ap = AutoParallel(model, lambda: torch.randn(BATCH, 8), mesh)
            with ap.configure_ac(**settings).configure_compile("eager"):
                ap.add_input_constraints([batch])
                ap.add_parameter_memory_constraint()
                parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
            own = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, batch)
            out, expected = parallel(own.to_local()), model(x)
            torch.testing.assert_close(
                out.full_tensor(), expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
            )
            weights = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape)
            whole = DTensor.from_local(weights, mesh, [Replicate()] * mesh.ndim)
            (out * whole.redistribute(mesh, out.placements)).sum().backward()
            (expected * weights).sum().backward()
            assert_same(parallel, model, (name, settings))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_values_and_gradients_are_those_of_one_process(shape):
    launch(run_models, torch.Size(shape).numel(), shape)


def run_losses():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_rank()
    for name, loss_fn in LOSSES.items():
        torch.manual_seed(0)
        model, x, y = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
        ap = AutoParallel(model, lambda x=x, y=y: (x, y), mesh, loss_fn=loss_fn)
        parallel = ap.configure_compile("eager").parallelize()
        loss, expected = parallel(x.chunk(2)[rank], y.chunk(2)[rank]), loss_fn(model(x), y)
        torch.testing.assert_close(loss, expected, msg=name)
        loss.backward()
        expected.backward()
        assert_same(parallel, model, name)


def test_losses_in_the_graph_are_those_of_one_process():
    launch(run_losses, 2)


def built(model, inputs, **settings):
    ap = AutoParallel(model, inputs, fake_mesh((1,))).configure_compile("eager")
    return ap.configure_ac(**settings).parallelize()


def test_the_parallel_module_owns_its_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    first = built(model, lambda: torch.randn(8, 4))
    second = built(model, lambda: torch.randn(8, 4))
    first(torch.randn(8, 4)).square().sum().backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(second.state_dict()[name].full_tensor(), value), name


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_backward_runs_twice_where_the_graph_is_retained(settings):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
    parallel = built(model, lambda: torch.randn(4, 8), **settings)
    loss = parallel(torch.randn(4, 8)).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.full_tensor().clone() for p in parallel.parameters()]
    loss.backward()
    for p, g in zip(parallel.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), 2 * g)


def test_hooks_of_the_root_run_once():
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    parallel = built(model, lambda: torch.randn(4, 8))
    x = torch.randn(4, 8)
    torch.testing.assert_close(parallel(x), model(x))


class Indexes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)[x > 0]


class Reads(Indexes):
    def forward(self, x):
        return self.linear(x) * x.sum().item()


@pytest.mark.parametrize("model", [Indexes, Reads])
def test_sizes_and_numbers_that_depend_on_values_are_refused_by_line(model):
    with pytest.raises(CaptureError, match=r"test_numbers\.py:\d+"):
        built(model(), lambda: torch.randn(4, 8))


class Collector:
    """What a library holds for the time of a call, as Hugging Face's of hidden states."""

    value, on = None, False


COLLECTOR, OPEN = Collector(), []


class Assigns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.what, self.calls, self.seen = what, 0, []

    def forward(self, x):
        if self.what == "buffer":
            self.mean = self.mean * 0.9 + x.mean(0)
        elif self.what == "number":
            self.calls += 1
        elif self.what == "list":
            self.seen.append(1)
        elif self.what == "flag left on":
            COLLECTOR.on = True
        elif self.what == "tensor left":
            COLLECTOR.value = x
        elif self.what == "put back":
            COLLECTOR.on, COLLECTOR.value = True, x
            OPEN.append(1)
            x = x * len(OPEN) if COLLECTOR.on else x
            OPEN.pop()
            COLLECTOR.on, COLLECTOR.value = False, None
        else:
            self.mean.mul_(0.9).add_(x.mean(0))
        local = [1]
        local.append(2)
        return self.linear(x) * self.mean


def test_a_buffer_that_is_assigned_is_refused_with_the_remedy():
    with pytest.raises(CaptureError, match=r"assigns a buffer .* of Assigns.*`self\.name\.copy_"):
        built(Assigns("buffer"), lambda: torch.randn(4, 8))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("number", "calls"),
        ("list", "seen"),
        ("flag left on", "COLLECTOR.on"),
        ("tensor left", "COLLECTOR.value"),
    ],
)
def test_state_in_python_is_told_to_stay_behind(what, name):
    with pytest.warns(UserWarning, match=f"what forward does to {name} in Python is done while"):
        built(Assigns(what), lambda: torch.randn(4, 8))


def test_state_that_is_put_back_is_told_of_to_nobody():
    model, x = Assigns("put back"), torch.randn(4, 8)
    torch.testing.assert_close(built(model, lambda: torch.randn(4, 8))(x), model(x))


def test_a_buffer_changed_in_place_is_as_the_models():
    model = Assigns("in place")
    parallel = built(model, lambda: torch.randn(4, 8))
    for _ in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(parallel(x), model(x))
    torch.testing.assert_close(parallel.mean.full_tensor(), model.mean)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_weight_that_is_changed_before_backward_is_refused_as_in_plain_pytorch(settings):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parallel = built(model, lambda: torch.randn(4, 8), **settings)
    for module, error in ((model, RuntimeError), (parallel, UsageError)):
        loss = module(torch.randn(4, 8)).sum()
        with torch.no_grad():
            module[2].weight.mul_(5)
        with pytest.raises(error, match="changed in place|modified by an inplace"):
            loss.backward()
        loss = module(torch.randn(4, 8)).sum()
        with torch.no_grad():
            module[2].bias.add_(1)  # which backward does not read
        loss.backward()
