"""Operators with parts written by hand: flex attention, communication, grouped matrix products."""

import copy

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention.flex_attention import flex_attention

from autop_ac import AutoParallel, CaptureError, fake_mesh
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import find_device
from autop_ac.sharding.options import OptionFinder

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Flex(torch.nn.Module):
    """Flex attention without gradients, the only kind that PyTorch has on CPU, next to a layer with them."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x):
        with torch.no_grad():
            parts = self.project(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in parts)
            y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * 0.5)
        return y.transpose(1, 2).flatten(2) + self.project(x)[..., :32]


def test_flex_attention_without_gradients_runs():
    torch.manual_seed(0)
    model = Flex()
    x = torch.randn(4, 16, 32)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in model.project(x).chunk(3, -1))
    attended = torch.softmax(q @ k.mT * 0.5 / 8**0.5, -1) @ v
    expected = attended.detach().transpose(1, 2).flatten(2) + model.project(x)[..., :32]
    with AutoParallel(copy.deepcopy(model), lambda: torch.randn(4, 16, 32), fake_mesh((1,))) as ap:
        ap.configure_device("H100").configure_compile("eager")
        parallel = ap.apply_placement(ap.optimize_placement())
    parallel.to_empty(device="cpu")
    with torch.no_grad():
        for (_, placed), (_, value) in zip(parallel.named_parameters(), model.named_parameters()):
            placed.to_local().copy_(value)
    torch.testing.assert_close(parallel(x), expected)


def test_communication_outside_of_local_map_is_refused():
    mesh = fake_mesh((4,))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return funcol.all_reduce((x @ self.weight).sum(0), "sum", mesh.get_group())

    with AutoParallel(Model(), lambda: torch.randn(8, 32), mesh) as ap:
        ap.configure_device("H100").configure_compile("eager")
        # run on whole tensors it would add up equal copies
        with pytest.raises(CaptureError, match=r"written by hand \(_c10d_functional.all_reduce"):
            ap.optimize_placement()


class Grouped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 32, 16))

    def forward(self, x):
        ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
        y = torch._grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends)
        return y.float()


def _local(value, placement, rank):
    if isinstance(placement, Partial):
        return value * (rank == 0)  # the parts add up to it
    return value.chunk(2, placement.dim)[rank].contiguous() if placement != R else value


def test_options_of_a_grouped_product_are_right_on_local_tensors():
    joint = capture(request(Grouped(), lambda: torch.randn(64, 32)))
    node = next(n for n in joint.module.graph.nodes if "_grouped_mm" in n.name)
    finder = OptionFinder(fake_mesh((2,)), find_device("H100"))
    found = finder.options(node)
    assert not finder.notes and len(found) >= 3
    torch.manual_seed(0)
    whole = torch.randn(64, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16()
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    expected = torch._grouped_mm(*whole, offs=ends).float()
    for option in found:
        rows, weight, offsets = (placed[0] for placed in option.inputs)
        assert offsets == R
        parts = []
        for rank in range(2):
            local = [_local(t, p, rank) for t, p in zip(whole, (rows, weight))]
            parts.append(torch._grouped_mm(*local, offs=ends).float())
        out = option.outputs[0][0]
        if isinstance(out, Partial):
            got = parts[0] + parts[1]
        else:
            got = torch.cat(parts, out.dim) if isinstance(out, Shard) else parts[0]
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-1)
