"""Equal layers share variables: the classes, the price of the plan, and its application."""

import functools
from collections import Counter

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from autop_ac import fake_mesh
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import Topology, find_device
from autop_ac.sharding.apply import apply_plan
from autop_ac.sharding.build import build_problem
from autop_ac.sharding.constraints import Constraints
from autop_ac.sharding.fold import fold
from autop_ac.sharding.formulation import evaluate
from autop_ac.sharding.groups import Settings
from autop_ac.sharding.optimise import optimise
from autop_ac.sharding.outcome import plan_of
from autop_ac.sharding.search import best_choice
from autop_ac.sharding.solve import solve
from tests.benchmarks.llama import Llama, LlamaConfig
from tests.gpt import GPT, GPTConfig

H100 = find_device("H100")


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@functools.cache  # graphs are read only
def llama_joint(layers):
    config = LlamaConfig(64, 4, 2, 128, 256, layers, 16)
    with torch.device("meta"):
        model = Llama(config)
    return capture(request(model, lambda: torch.zeros(16, 16, dtype=torch.long)))


@functools.cache
def gpt_joint(layers):
    config = GPTConfig(vocab_size=256, dim=64, heads=4, context=16, layers=layers)
    return capture(request(GPT(config), lambda: torch.zeros(16, 16, dtype=torch.long)))


class Stack(torch.nn.Module):
    """Residual layers that are quick to plan on two axes."""

    def __init__(self, layers):
        super().__init__()
        make = torch.nn.Linear
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(make(64, 256, False), torch.nn.ReLU(), make(256, 64, False))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@functools.cache
def stack_joint(layers):
    return capture(request(Stack(layers), lambda: torch.zeros(64, 64)))


def problem_of(joint, mesh, *, fold, constraints=None):
    topology = Topology.from_mesh_shape(tuple(mesh.shape))
    batch = ((Shard(0), *(Replicate() for _ in mesh.shape[1:])),)
    constraints = constraints or Constraints(batch, batch, parameter_high=1 / mesh.size())
    return build_problem(joint, constraints, Settings(mesh, H100, topology, fold=fold))


def test_the_number_of_classes_does_not_grow_with_depth():
    counts = []
    for layers in (5, 6):
        firsts = Counter(fold(llama_joint(layers), {}).values())
        counts.append(len(firsts))
        assert layers in firsts.values()
    assert counts[0] == counts[1]


def test_a_class_holds_one_node_of_each_layer_and_no_two_of_one():
    joint = llama_joint(5)
    members = {}
    for node, first in fold(joint, {}).items():
        members.setdefault(first, []).append(node)
    for first, nodes in members.items():
        assert len({n.target if n.op == "call_function" else n.op for n in nodes}) == 1
        values = [n.meta["val"] for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
        assert len({(v.shape, v.stride(), v.dtype) for v in values}) <= 1
        assert len(nodes) <= 5
        if first.op == "placeholder" and joint.placeholders[first.name].kind == "parameter":
            tails = {joint.placeholders[n.name].name.partition("layers.")[2][1:] for n in nodes}
            assert len(tails) == 1


def test_marks_keep_nodes_apart():
    joint = llama_joint(4)
    node = next(n for n in joint.module.graph.nodes if str(n.target) == "aten.silu.default")
    assert sum(first is node for first in fold(joint, {}).values()) == 4
    assert sum(first is node for first in fold(joint, {node: "mine"}).values()) == 1
    assert all(a is b for a, b in fold(joint, {}, enable=False).items())


def unfolded(folded, flat, chosen):
    """The choice for each node, as a choice for the problem without classes."""
    found = [0] * len(flat.problem.options)
    for name, group in flat.group_of.items():
        option = folded.problem.options[folded.group_of[name]][chosen[folded.group_of[name]]]
        placed = [(o.inputs, o.outputs) for o in flat.problem.options[group]]
        found[group] = placed.index((option.inputs, option.outputs))
    return found


@pytest.mark.parametrize(
    ("make", "layers", "shape"),
    [
        (llama_joint, 3, (4,)),
        (gpt_joint, 3, (4,)),
        (stack_joint, 4, (2, 2)),
    ],
)
def test_sharing_variables_loses_nothing(make, layers, shape):
    joint, mesh = make(layers), fake_mesh(shape)
    folded = problem_of(joint, mesh, fold=True)
    flat = problem_of(joint, mesh, fold=False)
    assert len(folded.problem.names) < len(flat.problem.names)
    settings = Settings(mesh, H100, Topology.from_mesh_shape(shape))
    batch = ((Shard(0), *(Replicate() for _ in shape[1:])),)
    limits = Constraints(batch, batch, parameter_high=1 / mesh.size())
    found, chosen, gap = best_choice(joint, limits, settings, gap=1e-5)
    # the solver alone takes half a minute for two axes
    best, reached = (solve if len(shape) == 1 else optimise)(flat.problem, gap=1e-5)
    assert max(gap, reached) <= 1e-4
    seconds = evaluate(found.problem, chosen)
    assert seconds == pytest.approx(evaluate(flat.problem, best), rel=1e-4)
    # counted node by node, the shared choice costs what the classes say
    chosen, _ = optimise(folded.problem)
    node_by_node = evaluate(flat.problem, unfolded(folded, flat, chosen))
    assert node_by_node == pytest.approx(evaluate(folded.problem, chosen), rel=1e-9)


def test_a_plan_of_shared_layers_can_be_applied():
    joint, mesh = llama_joint(4), fake_mesh((2, 2))
    built = problem_of(joint, mesh, fold=True)
    plan = plan_of(joint, mesh, built, *optimise(built.problem))
    local = apply_plan(joint, plan, mesh)
    names = [str(n.target) for n in local.module.graph.nodes]
    assert any("all_gather" in name for name in names)
    layers = [plan.parameters[f"layers.{i}.attention.wq.weight"] for i in range(4)]
    assert layers[1] == layers[2]
    total = sum(c.compute_s + c.redistribute_s for c in plan.choices.values())
    assert plan.objective_s == pytest.approx(total - plan.hidden_s)


def test_a_constrained_layer_keeps_its_own_placement():
    joint, mesh = llama_joint(4), fake_mesh((2,))
    name = "layers.2.attention.wq.weight"
    constraints = Constraints(nodes={name: (Shard(1),)})
    built = problem_of(joint, mesh, fold=True, constraints=constraints)
    plan = plan_of(joint, mesh, built, *optimise(built.problem))
    assert plan.parameters[name] == (Shard(1),)
    assert plan.parameters["layers.1.attention.wq.weight"] != (Shard(1),)
