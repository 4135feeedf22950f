"""Gathers of parameters: each counted once per side, and hidden as far as there is computation."""

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac import AutoParallel, fake_mesh
from autop_ac.capture.trace import capture, request
from autop_ac.graph.cost import fx_node_time_s
from autop_ac.graph.devices import DeviceSpec, Topology
from autop_ac.sharding.apply import apply_plan
from autop_ac.sharding.constraints import Constraints
from autop_ac.sharding.formulation import VISIBLE
from autop_ac.sharding.groups import Settings
from autop_ac.sharding.search import best_choice, search_with

R, S0 = Replicate(), Shard(0)
DEVICE = DeviceSpec("fast", {torch.float32: 1e15}, 1e18, 2**40)  # copies take no time


class Stack(torch.nn.Module):
    def __init__(self, layers=3, dim=64):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(dim, dim, bias=False) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def stack(rows=1024):
    return capture(request(Stack(), lambda: torch.randn(rows, 64)))


def planned(joint, shape, *, prefetch, device=DEVICE, again=True, bandwidth=1e12):
    topology = Topology((bandwidth,) * len(shape), (0.0,) * len(shape))
    mesh = fake_mesh(shape)
    settings = Settings(mesh, device, topology, None, again, prefetch=prefetch)
    batch = ((S0,) * len(shape),)
    constraints = Constraints(batch, batch, parameter_high=1 / math.prod(shape))
    return search_with(joint, constraints, settings), mesh, topology


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("again", [True, False])
def test_the_plan_counts_the_collectives_that_run(shape, again):
    joint = stack()
    plan, mesh, topology = planned(joint, shape, prefetch=False, again=again)
    assert plan.hidden_s == 0
    local, links = apply_plan(joint, plan, mesh), topology.links(mesh)
    time_s = {"parameter": 0.0, "rest": 0.0}
    for node in local.module.graph.nodes:
        if "_c10d_functional" not in str(node.target) or "wait" in str(node.target):
            continue
        gathers = "all_gather" in str(node.target) and node.meta["custom"]["autop_ac"]["parameter"]
        time_s["parameter" if gathers else "rest"] += fx_node_time_s(node, DEVICE, links)
    # forward gathers three weights, and backward, which does not read the first, two of them again, in a
    # gather of its own or in that of forward, computed again
    weight = 64 * 64 * 4 * (math.prod(shape) - 1) / math.prod(shape) / 1e12
    moving = sum(c.redistribute_s for c in plan.choices.values())
    assert moving == pytest.approx(time_s["rest"] + (5 if again else 3) * weight)
    in_graph = (3 * weight, 5 * weight) if again else (3 * weight,)
    assert any(time_s["parameter"] == pytest.approx(n) for n in in_graph)


def test_what_computation_hides_counts_a_tenth_and_no_more_is_hidden_than_is_computed():
    joint = stack()
    slow = DeviceSpec("slow", {torch.float32: 1e9}, 1e18, 2**40)
    shown, *_ = planned(joint, (4,), prefetch=False, device=slow)
    torch.distributed.destroy_process_group()
    hidden, *_ = planned(joint, (4,), prefetch=True, device=slow)
    moving = sum(c.redistribute_s for c in hidden.choices.values())
    assert hidden.hidden_s == pytest.approx((1 - VISIBLE) * moving)  # there is plenty to hide it
    assert hidden.objective_s < shown.objective_s
    torch.distributed.destroy_process_group()
    bound, *_ = planned(joint, (4,), prefetch=True, bandwidth=1e6)
    computing = sum(c.compute_s for c in bound.choices.values())
    moving = sum(c.redistribute_s for c in bound.choices.values())
    assert moving > 100 * computing
    assert 0 < bound.hidden_s <= (1 - VISIBLE) * computing * (1 + 1e-9)


def test_the_search_hides_what_the_switch_lets_run_beside_computation():
    def hidden_s(**comm):
        ap = AutoParallel(Stack(), lambda: torch.randn(2**16, 64), fake_mesh(4))
        with ap.configure_comm(**comm):
            ap.add_parameter_memory_constraint()
            return ap.optimize_placement().hidden_s

    assert hidden_s() == hidden_s(all_gather_bucket=None) > 0
    assert hidden_s(prefetch=False) == hidden_s(prefetch=False, all_gather_bucket="1 GiB") == 0


def test_each_layer_hides_its_own_and_equal_layers_share_a_stream():
    joint = capture(request(Stack(6), lambda: torch.randn(64, 64)))
    settings = Settings(fake_mesh((2,)), DEVICE, Topology((1e9,), (0.0,)))
    built, _, _ = best_choice(joint, Constraints(), settings)
    streams = built.problem.streams
    assert {s.side for s in streams} == {0, 1}
    in_forward = [n for s in streams if s.side == 0 for _, n in s.computing]
    # relu and mm of each layer; those of the layers in the middle are added up
    assert max(in_forward) > 1
