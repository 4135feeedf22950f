"""Hints and rules in models as users have them, read off the plan and the graphs of one device."""

from collections import Counter, defaultdict

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard

import autop_ac.api as api
import autop_ac.lowering.compile as compile_module
from autop_ac import MATMUL, AutoParallel, ac_region, every, fake_mesh
from autop_ac.recompute.carry import root_of
from autop_ac.recompute.plan import Origin
from tests.standins import BIASED, MATMULS, UNBIASED, WIDTH, Conv1D, Model, Output

aten = torch.ops.aten


class Planned:
    """What one application decided, and what its backward really takes."""

    def __init__(self, recompute, partition, report, parallel):
        self.facts, self.plan = recompute.facts, recompute.plan
        self.report, self.parallel = report, parallel
        backward = {n.name for n in partition[1].graph.nodes if n.op == "placeholder"}
        self.kept = [v for v in self.facts.forward if v.name in backward]

    def decided(self, *origins):
        """Module, captured operator, action and reason of what hints and rules decided."""
        return [
            (v.module, v.captured_op, d.action, d.reason)
            for v in self.facts.forward
            if v.follows is None
            for d in (self.plan.decisions[v.index],)
            if d.origin in (origins or (Origin.HINT, Origin.RULE))
        ]

    def reasons(self, action):
        return Counter(reason for _, _, done, reason in self.decided() if done == action)

    def kept_for(self, module):
        """Why what is kept of a module is kept."""
        mine = [v for v in self.kept if v.module.startswith(module)]
        return Counter(self.plan.decisions[root_of(self.facts, v.index)].reason for v in mine)


@pytest.fixture
def plan(monkeypatch):
    recomputes, partitions = [], []

    def spy(module, name, seen):
        real = getattr(module, name)

        def call(*args, **kwargs):
            seen.append(real(*args, **kwargs))
            return seen[-1]

        monkeypatch.setattr(module, name, call)

    spy(api, "plan_recompute", recomputes)
    spy(compile_module, "partition", partitions)

    def run(model, shape=(2,), **ac):
        mesh = fake_mesh(shape)
        ap = AutoParallel(model, lambda: torch.randn(4, 4, WIDTH), mesh)
        ap.configure_ac(**{"stage_size": None, **ac}).configure_compile("eager")
        with ap:
            ap.add_input_constraints([(Shard(0), *[Replicate()] * (len(shape) - 1))])
            ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
            parallel = ap.apply_placement(ap.optimize_placement())
        torch.distributed.destroy_process_group()
        return Planned(recomputes[-1], partitions[-1], ap.ac_report, parallel)

    return run


@pytest.mark.parametrize(
    ("linear", "shape"),
    [(Conv1D, (2,)), (Conv1D, (2, 2)), (BIASED, (2,)), (UNBIASED, (2, 2))],
    ids=["conv1d", "conv1d-2d", "biased", "unbiased-2d"],
)
def test_matmuls_saved_in_each_layer_and_nothing_else(plan, linear, shape):
    planned = plan(Model(linear, MATMULS), shape)
    saves = planned.reasons("save")
    # two projections, two products of attention, two of the MLP, in each of two layers
    assert saves['ac_region "layer" saves MATMUL'] == 12
    assert saves['ac_region "layer" recomputes the rest'] == 0
    for layer in ("layers.0", "layers.1"):
        kept = planned.kept_for(layer)
        assert kept['ac_region "layer" saves MATMUL'] >= 4
        assert set(kept) <= {'ac_region "layer" saves MATMUL', 'enters ac_region "layer"'}
    assert planned.plan.notes == ()


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_region_that_recomputes_all_keeps_what_enters_it_alone(plan, shape):
    planned = plan(Model(region={}), shape)
    assert set(planned.kept_for("layers.0")) <= {'enters ac_region "layer"'}
    assert not planned.kept_for("layers.1")
    # the one before it, on its way to its last move, is what the first layer keeps
    assert 'enters ac_region "layer"' in planned.kept_for("")


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("by", ["region", "rules"])
def test_names_reach_their_values_behind_views_and_moves(plan, by, shape):
    if by == "region":
        planned = plan(Model(region={"save": ["attention_out", "up"]}), shape)
        reason = 'ac_region "layer" saves {}, a view of it'
    else:
        rules = ["::attention_out=save", "layers.*.mlp::up=save", "layers.*=recompute"]
        planned = plan(Model(), shape, rules=rules)
        reason = 'rule "{}=save", on a view of it'
    texts = ("attention_out", "up") if by == "region" else ("::attention_out", "layers.*.mlp::up")
    out, up = (reason.format(text) for text in texts)
    saves = planned.reasons("save")
    assert (saves[out], saves[up]) == (2, 2)
    for layer in ("layers.0", "layers.1"):
        # what follows recomputes from them: they are read, and so really kept
        assert planned.kept_for(layer)[up] == 1
        if by == "region":
            assert planned.kept_for(layer)[out] == 1
    assert planned.plan.notes == ()
    assert "a view of it" in str(planned.report).replace("\n", " ")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_each_layer(plan, reentrant):
    model = Model()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    planned = plan(model)
    layers = [d for d in planned.decided() if d[0].startswith("layers.")]
    assert Counter(d[0].split(".")[1] for d in layers) == {"0": 14, "1": 14} or layers
    assert {d[3] for d in layers if d[2] == "recompute"} == {"torch.utils.checkpoint recomputes it"}
    assert {d[3] for d in layers if d[2] == "save"} <= {"enters torch.utils.checkpoint"}
    assert set(planned.kept_for("layers.")) <= {"enters torch.utils.checkpoint"}


def test_reentrant_checkpoints_are_taken_as_the_others():
    from tests.test_hints import resolved_of

    hints = []
    for reentrant in (True, False):
        model = Model()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        hints.append(resolved_of(model, torch.randn(2, 4, WIDTH)).wishes)
    assert hints[0] == hints[1] != {}


def wrapped(model, how):
    for i, layer in enumerate(model.layers):
        if how == "checkpoint_wrapper":
            model.layers[i] = checkpoint_wrapper(layer)
        elif how == "compile":
            layer.mlp = torch.compile(layer.mlp)
            layer.attention.qkv = torch.compile(layer.attention.qkv)
    return model


@pytest.mark.parametrize("how", ["checkpoint_wrapper", "compile"])
def test_wrappers_leak_into_no_path_and_hide_no_value(plan, how):
    plain = plan(Model(region=MATMULS))
    planned = plan(wrapped(Model(region=MATMULS), how))
    modules = {v.module for v in planned.facts.forward}
    assert modules == {v.module for v in plain.facts.forward}
    assert "layers.1.attention.qkv" in modules
    names = {v.parameter for v in planned.facts.values if v.parameter}
    assert names == {n for n, _ in Model().named_parameters()}
    assert planned.reasons("save")['ac_region "layer" saves MATMUL'] == 12
    kept = planned.kept_for("layers.1")
    assert kept['ac_region "layer" saves MATMUL'] >= 4
    assert not [text for text in kept if text.endswith("recomputes it")]


def test_rules_reach_modules_in_wrappers(plan):
    rules = ["layers.*.attention.qkv::MATMUL=save", "layers.[1]=recompute"]
    planned = plan(wrapped(Model(), "compile"), rules=rules)
    assert planned.plan.notes == ()
    first, second = (f'rule "{rule}"' for rule in rules)
    by_layer = defaultdict(Counter)
    for module, _, action, reason in planned.decided():
        by_layer[module.split(".")[1] if "." in module else module][action, reason] += 1
    assert by_layer["0"] == {("save", first): 1}
    assert by_layer["1"]["save", first] == 1 and by_layer["1"]["recompute", second] >= 9


class Seven(torch.nn.Module):
    def __init__(self, region=None):
        super().__init__()
        self.region = region
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7))
            for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            if self.region is None:
                x = x + self.part(layer, x)
            else:
                with ac_region("seven", **self.region):
                    x = x + self.part(layer, x)
        return x

    def part(self, layer, x):
        for linear in layer:
            x = linear(x).tanh()
        return x


@pytest.mark.parametrize("by", ["region", "rule"])
def test_p15_every_second_of_seven_matmuls_after_sharding(plan, by):
    if by == "rule":
        planned = plan(Seven(), rules=["::aten.mm/2=save", "layers=recompute"])
    else:
        planned = plan(Seven({"save": [every(2, aten.mm)]}))
    assert planned.plan.notes == ()
    chosen = "aten.mm/2"
    matmuls = {
        layer: [
            action
            for module, op, action, reason in planned.decided()
            if module.startswith(f"layers.{layer}.") and op == "aten.mm.default"
        ]
        for layer in range(4)
    }
    assert matmuls == {layer: ["save", "recompute"] * 3 + ["save"] for layer in range(4)}
    kept = [
        Counter(
            v.module.removeprefix(f"layers.{layer}.")
            for v in planned.kept
            if v.module.startswith(f"layers.{layer}.")
            and chosen in planned.plan.decisions[root_of(planned.facts, v.index)].reason
        )
        for layer in range(4)
    ]
    assert kept[0] and all(k == kept[0] for k in kept)


def test_hints_leave_outputs_and_gradients_as_they_are():
    torch.manual_seed(0)
    x = torch.randn(4, 4, WIDTH)
    single = Model(region={"save": ["attention_out"], "recompute": [every(2, MATMUL)]})
    expected = single(x)
    expected.logits.square().sum().backward()
    mesh = fake_mesh((1,))
    ap = AutoParallel(single, lambda: torch.randn(4, 4, WIDTH), mesh).configure_compile("eager")
    parallel = ap.parallelize()
    assert "ac_region" in str(ap.ac_report)
    out = parallel(x)
    assert type(out) is Output and len(out.hidden) == 3
    torch.testing.assert_close(out.logits, expected.logits)
    out.logits.square().sum().backward()
    for (name, got), want in zip(parallel.named_parameters(), single.parameters()):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, msg=name)
