"""`local_map` in a model: what is written by hand for one device trains as one process does."""

import traceback

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from autop_ac import AutoParallel, CaptureError, ConfigError, ac_region, fake_mesh, launch
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import Topology, find_device
from autop_ac.sharding.options import OptionFinder
from tests.zoo import DIM, DispatchedExperts, Experts

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
aten = torch.ops.aten


class Base(torch.nn.Module):
    """A part written by hand between two layers; `whole` is the same on one process."""

    inputs, outputs = ((S1,), (S0,), (R,)), ((R,),)
    gradients = None

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh = mesh
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.weight = torch.nn.Parameter(torch.randn(32, 16) / 6)
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mesh is None:
            y = self.whole(h, self.weight, self.scale)
        else:
            written = local_map(
                self.local, out_placements=self.outputs, in_placements=self.inputs,
                in_grad_placements=self.gradients, device_mesh=self.mesh, redistribute_inputs=True,
            )  # fmt: skip
            y = written(h, self.weight, self.scale)
        return self.down(y + x)

    def whole(self, h, weight, scale):
        y = h @ weight
        return y.tanh() * scale + y

    def sum(self, x):
        return funcol.all_reduce(x, "sum", self.mesh.get_group())


class Summed(Base):
    """A product cut along what is summed, added up, and used with a replicated tensor."""

    def local(self, h, weight, scale):
        return self.whole(self.sum(h @ weight), torch.eye(16, dtype=h.dtype), scale)


class LeftOver(Base):
    """The sum is left to what comes after."""

    outputs = ((P,),)

    def local(self, h, weight, scale):
        return (h @ weight) * scale

    def whole(self, h, weight, scale):
        return (h @ weight) * scale


class Mean(LeftOver):
    """What is left is a mean: of each device's own product, twice as large."""

    outputs = ((Partial("avg"),),)

    def local(self, h, weight, scale):
        return (h @ weight) * scale * 2


class Gathered(Base):
    """Rows in parts; the weight, in parts too, is gathered by hand. More results and arguments than tensors."""

    inputs, outputs = ((S0,), (S1,), (R,), None), ((S0,), (R,), None)

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mesh is None:
            y = self.whole(h, self.weight, self.scale)
            total = y.sum(0)
        else:
            y, total, number = local_map(
                self.local, self.outputs, self.inputs, device_mesh=self.mesh
            )(h, self.weight, self.scale, 3)
            y = y * (number - 2)
        return self.down(y * total + x)

    def local(self, h, weight, scale, number):
        weight = funcol.all_gather_tensor(weight, 1, self.mesh.get_group())
        y = self.whole(h, weight, scale)
        return y, self.sum(y.sum(0)), number


class Told(Base):
    """Gradients enter whole and leave as told: here nothing is replicated but what is told Partial."""

    inputs, outputs, gradients = ((S0,), (R,), (R,)), ((S0,),), ((S0,), (P,), (P,))

    def local(self, h, weight, scale):
        return self.whole(h, weight, scale)


class Untold(Told):
    """The same, found out."""

    gradients = None


class Enter(torch.autograd.Function):
    """Copies in, gradients added up: the one end of a block cut as Megatron does."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return funcol.all_reduce(gradient, "sum", ctx.group), None


class Leave(torch.autograd.Function):
    """Parts added up, the gradient as it comes: the other end."""

    @staticmethod
    def forward(ctx, x, group):
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Megatron(Base):
    inputs, outputs = ((R,), (S1,), (S0,)), ((R,),)
    gradients = ((R,), (S1,), (S0,))

    def whole(self, h, weight, scale):
        return torch.relu(h @ weight) * 0.5 + (torch.relu(h @ weight) @ torch.diag(scale))

    def local(self, h, weight, scale):
        group = self.mesh.get_group()
        here = torch.relu(Enter.apply(h, group) @ weight)
        own = torch.zeros(here.shape[1], 16, dtype=h.dtype)
        first = here.shape[1] * self.mesh.get_local_rank()
        rows = torch.arange(here.shape[1])
        own = own.index_put((rows, rows + first), scale + 0.5)
        return Leave.apply(here @ own, group)


class Experted(torch.nn.Module):
    """Tokens sent to their experts and back, as in the zoo."""

    def __init__(self, mesh=None):
        super().__init__()
        self.experts = Experts(4) if mesh is None else DispatchedExperts(mesh, 4)

    def forward(self, x):
        return self.experts(x)[0]


CASES = {
    "summed": (Summed, (2,), {}),
    "left over": (LeftOver, (2,), {}),
    "mean": (Mean, (2,), {}),
    "gathered": (Gathered, (2,), {}),
    "told": (Told, (2,), {}),
    "untold": (Untold, (2,), {}),
    "megatron": (Megatron, (2,), {}),
    "recomputed": (Summed, (2,), {"ac": {"stage_size": "1 KiB"}}),
    "experts in parts": (Experted, (1, 2), {}),
    # copies of the experts see other tokens
    "experts in copies": (Experted, (2, 1), {}),
    "experts, compiled": (Experted, (2,), {"backend": "inductor"}),
}


def compare(make, shape, backend="eager", ac=None):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape)
    model, single = make(mesh).double(), make().double()
    single.load_state_dict(model.state_dict())
    x = torch.randn(8, 16).double()
    placements = (S0,) * mesh.ndim
    with AutoParallel(model, lambda: x, mesh).configure_compile(backend) as ap:
        ap.configure_ac(**(ac or {}))
        ap.add_input_constraints([placements])
        ap.add_output_constraints([placements])
        parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
    got = parallel(distribute_tensor(x, mesh, placements).to_local()).full_tensor()
    expected = single(x)
    weights = torch.randn_like(expected)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(got, expected)
    for (name, p), (_, q) in zip(parallel.named_parameters(), single.named_parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{n}: {m}")


class Dropped(Base):
    inputs, outputs = ((S0,),), ((S0,),)

    def forward(self, x):
        dropped = local_map(self.local, self.outputs, self.inputs, device_mesh=self.mesh)
        return dropped(self.scale * torch.ones_like(x)), self.scale.sum()

    def local(self, x):
        return torch.nn.functional.dropout(x, 0.5)


def dropped():
    """Parts draw their own masks, and backward has the mask of forward."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    with AutoParallel(Dropped(mesh), lambda: torch.ones(16, 16), mesh) as ap:
        ap.configure_compile("eager")
        parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
    y, _ = parallel(torch.ones(8, 16))
    y = y.full_tensor()
    y.sum().backward()
    first, second = (y != 0).chunk(2)
    assert 0 < first.sum() < 128 and not torch.equal(first, second)
    scale = parallel.scale.full_tensor().detach()
    torch.testing.assert_close(parallel.scale.grad.full_tensor() * scale, y.detach().sum(0))


def run_all():
    torch.set_num_threads(1)
    found = {}
    for name, (make, shape, how) in CASES.items():
        try:
            compare(make, shape, **how)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    try:
        dropped()
        found["dropped"] = ""
    except Exception:
        found["dropped"] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def results():
    return launch(run_all, 2)


@pytest.mark.parametrize("case", [*CASES, "dropped"])
def test_it_trains_as_one_process_does(results, case):
    for found in results:
        assert not found[case], found[case]
