"""Constraints in the model, on modules and on memory; the plan without any; conflicts."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac import (
    AutoParallel,
    ConfigError,
    DeviceSpec,
    InfeasibleError,
    fake_mesh,
    with_sharding_constraint,
)
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import Topology
from autop_ac.sharding.apply import apply_plan
from autop_ac.sharding.build import build_problem
from autop_ac.sharding.constraints import Constraints
from autop_ac.sharding.groups import Settings
from autop_ac.sharding.limits import worth_s

R, S0, S1 = Replicate(), Shard(0), Shard(1)
aten = torch.ops.aten


class Constrained(torch.nn.Module):
    def __init__(self, placements=(S0, S1)):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.placements = placements

    def forward(self, x):
        hidden = with_sharding_constraint(self.up(x), self.placements)
        return self.down(torch.relu(hidden))


class Stack(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def opened(model, shape=(2, 2), rows=8):
    ap = AutoParallel(model, lambda: torch.randn(rows, 16), fake_mesh(shape))
    return ap.configure_device("H100").configure_compile("eager")


def aliases(ap):
    return [n for n in ap._joint.module.graph.nodes if n.target is aten.alias.default]


def test_a_value_lies_where_the_model_says_and_so_does_its_gradient():
    with opened(Constrained()) as ap:
        plan = ap.optimize_placement()
        forward, backward = aliases(ap)
        assert plan.choices[forward.name].outputs == ((S0, S1),)
        assert plan.choices[backward.name].outputs == ((S0, S1),)
        local = apply_plan(ap._joint, plan, ap._mesh)
    operators = [str(n.target) for n in local.module.graph.nodes]
    assert not any("alias" in op or "placed" in op for op in operators)


def test_without_a_mesh_the_constraint_does_nothing():
    model, x = Constrained(), torch.randn(8, 16)
    expected = model.down(torch.relu(model.up(x)))
    assert torch.equal(model(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize(
    ("placements", "rows", "text"),
    [
        ((S0,), 8, r"1 entries, and the mesh \(2, 2\) 2 axes"),
        ((S0, S1), 7, r"does not cut \(7, 32\)"),
        ((S0, Shard(2)), 8, r"Shard\(2\) of a tensor of shape \(8, 32\): dims are 0 to 1"),
        ((S0, Shard(-3)), 8, r"Shard\(-3\) of a tensor of shape \(8, 32\)"),
    ],
)
def test_a_constraint_that_does_not_fit_names_its_line(placements, rows, text):
    text = r"test_sharding_constraints\.py:\d+.*" + text
    with (
        opened(Constrained(placements), rows=rows) as ap,
        pytest.raises(ConfigError, match=text),
    ):
        ap.optimize_placement()


def test_a_dim_that_the_tensor_has_not_is_refused_with_the_tensor_and_its_dims():
    with opened(Stack(), (2,)) as ap:
        fixed = ap.sharding_optimizer
        dims = r"Shard\(5\) of a tensor of shape \({}\): dims are 0 to 1, or -2 to -1"
        for constrain, whose, shape in (
            (lambda p: ap.add_input_constraints([p]), r"input constraint 0 \(x\)", "8, 16"),
            (lambda p: ap.add_output_constraints([p]), "output constraint 0", "8, 16"),
            (lambda p: fixed.add_node_constraint("layers.0.0.weight", p), "layers.0.0", "64, 16"),
        ):
            with pytest.raises(ConfigError, match=f"{whose}.*{dims.format(shape)}"):
                constrain((Shard(5),))
            constrain((Shard(-1),))
        with pytest.raises(ConfigError, match="did you mean layers.0.0.weight"):
            fixed.add_node_constraint("layers.0.0.wieght", (S0,))
        fixed.add_module_constraint("layers.*.2", (Shard(-2),))
        plan = ap.optimize_placement()
        assert plan.parameters["layers.0.0.weight"] == (S1,)
        fixed.add_module_constraint("layers.*.2", (Shard(5),))
        with pytest.raises(ConfigError, match=r"'layers\.\*\.2'.*" + dims.format("8, 16")):
            ap.optimize_placement()


@pytest.mark.parametrize("placements", ["S(0)", (), (1,), None])
def test_what_is_no_placement_is_refused_in_eager_too(placements):
    with pytest.raises(ConfigError, match="with_sharding_constraint got"):
        with_sharding_constraint(torch.ones(2), placements)


def test_dims_may_be_counted_from_the_end():
    with opened(Constrained((R, Shard(-1)))) as ap:
        plan = ap.optimize_placement()
        assert plan.choices[aliases(ap)[0].name].outputs == ((R, S1),)


def test_modules_hand_over_what_they_are_told_to():
    with opened(Stack(), (2,)) as ap:
        ap.add_input_constraints([(R,)])
        ap.add_output_constraints([(R,)])
        ap.sharding_optimizer.add_module_constraint("layers.*.0", (S1,))
        plan = ap.optimize_placement()
        ups = [n for n in ap._joint.module.graph.nodes if n.target is aten.addmm.default][::2]
        assert [plan.choices[n.name].outputs for n in ups] == [((S1,),)] * 3
        ap.sharding_optimizer.add_module_constraint("layer.1", (S1,))
        with pytest.raises(ConfigError, match="no module 'layer.1'.*did you mean layers"):
            ap.optimize_placement()


def test_two_module_constraints_that_differ_are_refused():
    with opened(Stack(), (2,)) as ap:
        ap.sharding_optimizer.add_module_constraint("layers.*.0", (S1,))
        ap.sharding_optimizer.add_module_constraint("layers.1.0", (S1,))
        ap.optimize_placement()
        ap.sharding_optimizer.add_module_constraint("layers.1.0", (R,))
        with pytest.raises(ConfigError, match="'layers.1.0': .*another module constraint gives"):
            ap.optimize_placement()


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)

    def forward(self, x):
        return self.up(x).split(16, dim=-1)


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = TwoOutputs(), torch.nn.Linear(16, 16)

    def forward(self, x):
        gate, up = self.both(x)
        return self.down(torch.sigmoid(gate) * up)


@pytest.mark.parametrize("placements", [(R,), (S0,)])
def test_each_tensor_that_a_module_hands_over_is_where_it_is_told_to_be(placements):
    with opened(Gated(), (2,)) as ap:
        ap.sharding_optimizer.add_module_constraint("both", placements)
        plan = ap.optimize_placement()
        (split,) = (n for n in ap._joint.module.graph.nodes if n.target is aten.split.Tensor)
        assert plan.choices[split.name].outputs == (placements, placements)
        ap.sharding_optimizer.add_module_constraint("both", (S1,))  # along it, the parts are cut
        with pytest.raises(ConfigError, match="module constraint: split.*cannot give"):
            ap.optimize_placement()


def test_a_share_of_parameters_that_the_mesh_cannot_reach_is_refused():
    with opened(Stack(), (4,)) as ap:
        ap.add_parameter_memory_constraint(0.0, 1 / 4)
        ap.optimize_placement()
        ap.add_parameter_memory_constraint(0.0, 1 / 5)
        with pytest.raises(InfeasibleError, match="at least .* per device; asked for") as caught:
            ap.optimize_placement()
        whole = sum(p.numel() * 4 for p in Stack().parameters())
        assert caught.value.smallest_bytes == whole // 4
        assert caught.value.budget_bytes == whole // 5


def state_bytes(plan, model, copies):
    """Bytes on one device: the parameter, its gradient, and the optimizer's copies."""
    total = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        for placement, devices in zip(plan.parameters[name], plan.mesh_shape):
            count //= devices if placement.is_shard() else 1
        total += count * parameter.element_size() * (2 + copies)
    return total


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 0), (None, 0)])
def test_parameters_gradients_and_optimizer_state_stay_below_the_limit(optimizer, copies):
    model = Stack()
    whole = sum(p.numel() * 4 * (2 + copies) for p in model.parameters())
    least = whole // 4  # each parameter can be cut in four
    with opened(model, (4,)) as ap:
        ap.add_state_memory_constraint(least, optimizer)
        plan = ap.optimize_placement()
        assert state_bytes(plan, model, copies) == least
        assert not any("no limit" in note for note in plan.notes)
        ap.add_state_memory_constraint(least - 1, optimizer)
        with pytest.raises(InfeasibleError) as caught:
            ap.optimize_placement()
    assert caught.value.smallest_bytes == least


def test_a_state_limit_out_of_reach_tells_what_can_be_reached():
    with opened(Stack(), (4,)) as ap:
        ap.add_state_memory_constraint(1000)
        with pytest.raises(
            InfeasibleError, match="state memory.*at least \\d+ per device"
        ) as caught:
            ap.optimize_placement()
        assert caught.value.budget_bytes == 1000 < caught.value.smallest_bytes
        ap.add_state_memory_constraint(caught.value.smallest_bytes)
        ap.optimize_placement()
    with pytest.raises(ConfigError, match="optimizer='adam_w'"), opened(Stack()) as ap:
        ap.add_state_memory_constraint("1 GiB", "adam_w")


def test_conflicting_constraints_are_named_with_what_would_do():
    with opened(Constrained((R, R))) as ap:
        ap.add_parameter_memory_constraint(0.0, 0.25)
        name = next(n for n, p in ap._joint.placeholders.items() if p.name == "up.weight")
        ap.sharding_optimizer.add_node_constraint(name, (R, R))
        with pytest.raises(InfeasibleError) as caught:
            ap.optimize_placement()
    text = str(caught.value)
    assert "in conflict: parameter memory and node" in text
    assert (
        f"What would do: parameter memory of {32 * 16 * 4}" in text or "bytes of parameters" in text
    )
    assert f"{name} at (" in text and "with_sharding_constraint stands at" in text


def device(memory_bytes):
    return DeviceSpec("small", {torch.float32: 1e13}, 1e12, memory_bytes)


def test_the_first_plan_shards_parameters_that_do_not_fit_and_says_so():
    model = Stack()
    whole = sum(p.numel() * 16 for p in model.parameters())
    for memory, words in (
        (8 * whole, "where that costs little time"),
        (whole, "they are sharded"),
    ):
        ap = opened(model, (4,)).configure_device(device(memory))
        with ap:
            plan = ap.optimize_placement()
        assert any(words in note and "no limit on memory" in note for note in plan.notes)
        assert state_bytes(plan, model, 2) <= memory / 2
        inputs = [n for n, p in ap._joint.placeholders.items() if p.kind == "input"]
        assert plan.choices[inputs[0]].outputs == ((S0,),)
        torch.distributed.destroy_process_group()


def test_without_a_limit_the_memory_of_a_device_is_worth_a_twentieth_of_the_computation():
    model, memory_bytes = Stack(), 2**20
    described = device(memory_bytes)
    joint = capture(request(model, lambda: torch.randn(8, 16)))
    settings = Settings(fake_mesh((4,)), described, Topology((1e9,), (0.0,)))
    problem = build_problem(joint, Constraints(), settings).problem
    weighed = worth_s(problem, described)  # once more than it is already
    added = 0.0
    for options, before, after, count in zip(
        problem.options, problem.option_s, weighed, problem.counts, strict=True
    ):
        most = max(range(len(options)), key=lambda i: options[i].output_bytes)
        added += count * (after[most] - before[most])
    least_s = sum(
        n * min(o.compute_s for o in options)
        for n, options in zip(problem.counts, problem.options, strict=True)
    )
    whole = sum(p.numel() * 16 for p in model.parameters())
    assert added == pytest.approx(0.05 * least_s * whole / memory_bytes) and added > 0
    limited = build_problem(joint, Constraints(parameter_high=0.5), settings).problem
    assert worth_s(limited, described) == limited.option_s


def test_an_unknown_device_is_an_error_that_shows_how_to_describe_it():
    with pytest.raises(ConfigError, match=r"unknown device 'L4'.*DeviceSpec\('L4'.*memory_bytes="):
        opened(Stack()).configure_device("L4")
