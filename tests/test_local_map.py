"""`local_map` in a model: what is written by hand for one device trains as one process does."""

import copy

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from autop_ac import AutoParallel, CaptureError, ConfigError, fake_mesh, launch

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


class Rows(torch.nn.Module):
    """A product cut along what is summed, added up by hand; a residual goes around it."""

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh = mesh
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.weight = torch.nn.Parameter(torch.randn(32, 16) / 6)
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        h = torch.relu(self.up(x))
        y = self.summed(h, self.weight, self.scale) if self.mesh else self.whole(h)
        return self.down(y + x)

    def whole(self, h):
        y = h @ self.weight
        return y.tanh() * self.scale + y

    @property
    def summed(self):
        def summed(h, weight, scale):
            y = funcol.all_reduce(h @ weight, "sum", self.mesh.get_group())
            return y.tanh() * scale + y

        return local_map(
            summed, out_placements=((R,),), in_placements=((S1,), (S0,), (R,)),
            redistribute_inputs=True, device_mesh=self.mesh,
        )  # fmt: skip


def train(make, inputs, *, mesh, backend="eager", placements=None, constrain=None, ac=None):
    """Distances of loss and gradients from those of one process, and the module."""
    torch.manual_seed(0)
    model, single = make(mesh).double(), make(None).double()
    single.load_state_dict(model.state_dict())
    x = inputs().double()
    placements = placements or (S0,) * mesh.ndim
    with AutoParallel(model, lambda: x, mesh) as ap:
        ap.configure_compile(backend).configure_ac(**(ac or {}))
        ap.add_input_constraints([placements])
        if constrain:
            constrain(ap)
        plan = ap.optimize_placement()
        parallel = ap.apply_placement(plan, outputs="dtensor")
    outputs = parallel(distribute_tensor(x, mesh, placements).to_local())
    torch.manual_seed(1)
    expected = single(x)
    weights = torch.randn_like(expected)
    (outputs.full_tensor() * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(outputs.full_tensor(), expected)
    for (name, got), (_, right) in zip(parallel.named_parameters(), single.named_parameters()):
        torch.testing.assert_close(got.grad.full_tensor(), right.grad, msg=lambda m: f"{name}: {m}")
    return plan, parallel, ap


def rows(shape):
    mesh = init_device_mesh("cpu", shape)
    train(Rows, lambda: torch.randn(8, 16), mesh=mesh)
    return True


def test_a_sum_written_by_hand():
    assert launch(rows, 2, (2,)) == [True, True]
