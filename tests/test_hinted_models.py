"""Hints and rules in models as users have them, read off the plan and the graphs of one device."""

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autop_ac.build as build
import autop_ac.lowering.compile as compile_module
from autop_ac import MATMUL, AutoParallel, ac_region, checkpoint_name, every, fake_mesh
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

    spy(build, "plan_recompute", recomputes)
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
    [(Conv1D, (2,)), (BIASED, (2, 2)), (UNBIASED, (2,))],
    ids=["conv1d", "biased-2d", "unbiased"],
)
def test_matmuls_saved_in_each_layer_and_nothing_else(plan, linear, shape):
    layers = 1 if len(shape) > 1 else 2  # the search takes its time on two axes
    planned = plan(Model(linear, MATMULS, layers), shape)
    saves = planned.reasons("save")
    # two projections, two products of attention, two of the MLP, in each layer
    assert saves['ac_region "layer" saves MATMUL'] == 6 * layers
    assert saves['ac_region "layer" recomputes the rest'] == 0
    for layer in range(layers):
        kept = planned.kept_for(f"layers.{layer}")
        assert kept['ac_region "layer" saves MATMUL'] >= 4
        assert set(kept) <= {'ac_region "layer" saves MATMUL', 'enters ac_region "layer"'}
    assert planned.plan.notes == ()


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_region_that_recomputes_all_keeps_what_enters_it_alone(plan, shape):
    layers = 1 if len(shape) > 1 else 2
    planned = plan(Model(region={}, layers=layers), shape)
    assert set(planned.kept_for("layers.")) <= {'enters ac_region "layer"'}
    assert planned.kept_for("")['enters ac_region "layer"'] == layers


@pytest.mark.parametrize(("by", "shape"), [("region", (2,)), ("rules", (2,)), ("rules", (2, 2))])
def test_names_reach_their_values_behind_views_and_moves(plan, by, shape):
    layers = 1 if len(shape) > 1 else 2
    if by == "region":
        planned = plan(Model(region={"save": ["attention_out", "up"]}, layers=layers), shape)
        reason = 'ac_region "layer" saves {}, a view of it'
    else:
        rules = ["::attention_out=save", "layers.*.mlp::up=save", "layers.*=recompute"]
        planned = plan(Model(layers=layers), shape, rules=rules)
        reason = 'rule "{}=save", on a view of it'
    texts = ("attention_out", "up") if by == "region" else ("::attention_out", "layers.*.mlp::up")
    out, up = (reason.format(text) for text in texts)
    saves = planned.reasons("save")
    assert (saves[out], saves[up]) == (layers, layers)
    for layer in range(layers):
        # what follows recomputes from them: they are read, and so really kept
        kept = planned.kept_for(f"layers.{layer}")
        assert kept[up] == kept[out] == 1
    assert planned.plan.notes == ()
    assert "a view of it" in str(planned.report).replace("\n", " ")


def test_gradient_checkpointing_recomputes_each_layer(plan):
    model = Model()
    model.gradient_checkpointing_enable()
    planned = plan(model)
    layers = [d for d in planned.decided() if d[0].startswith("layers.")]
    computed = Counter(module.split(".")[1] for module, op, *_ in layers if op)
    assert computed["0"] == computed["1"] >= 10
    assert {d[3] for d in layers if d[2] == "recompute"} == {
        "torch.utils.checkpoint recomputes it",
        "torch.utils.checkpoint recomputes what moves in it",
    }
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
    planned = plan(wrapped(Model(region=MATMULS, layers=1), how))
    plain = Model(layers=1)
    modules = {v.module for v in planned.facts.forward}
    assert modules == {n for n, _ in plain.named_modules()} - {"layers"}
    names = {v.parameter for v in planned.facts.values if v.parameter}
    assert names == {n for n, _ in plain.named_parameters()}
    assert planned.reasons("save")['ac_region "layer" saves MATMUL'] == 6
    kept = planned.kept_for("layers.0")
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


class SevenLinears(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def forward(self, x):
        for linear in self.linears:
            x = linear(x).tanh()
        return x


class Seven(torch.nn.Module):
    """Seven matmuls in each layer: an odd number, so that one counter would drift."""

    def __init__(self, region=None):
        super().__init__()
        self.region = region
        self.layers = torch.nn.ModuleList(SevenLinears() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if self.region is None:
                x = layer(x)
            else:
                with ac_region("seven", **self.region):
                    x = layer(x)
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
        for layer in range(2)
    }
    assert matmuls == {layer: ["save", "recompute"] * 3 + ["save"] for layer in range(2)}
    kept = [
        Counter(
            v.module.removeprefix(f"layers.{layer}.")
            for v in planned.kept
            if v.module.startswith(f"layers.{layer}.")
            and chosen in planned.plan.decisions[root_of(planned.facts, v.index)].reason
        )
        for layer in range(2)
    ]
    # read where tanh is computed again; the last one of a layer is not where it enters a region
    first, last = ({f"linears.{i}": 1 for i in (0, 2, 4, *more)} for more in ((), (6,)))
    assert kept == [last if by == "rule" else first, last]


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


class Pair(torch.nn.Module):
    """An operator of several results, of which one has a name."""

    def __init__(self, region):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.region = region

    def forward(self, x):
        with ac_region("pair", **self.region):
            variance, mean = torch.var_mean(self.linear(x), -1, keepdim=True)
            return x * checkpoint_name(variance, "item").exp() * mean.sin()


@pytest.mark.parametrize("parent", [None, "save", "recompute"])
@pytest.mark.parametrize("item", [None, "save", "recompute"])
def test_a_parent_and_its_item_hinted_in_all_nine_ways(plan, parent, item):
    region = {"save": [], "recompute": [], "otherwise": "auto"}
    for action, selector in ((parent, aten.var_mean), (item, "item")):
        if action:
            region[action].append(selector)
    planned = plan(Pair(region), (1,))
    results = [v for v in planned.facts.forward if v.captured_op == "aten.var_mean.correction"]
    items = [v for v in planned.facts.forward if v.follows == results[0].index]
    actions = {planned.plan.decisions[v.index].action for v in (*results, *items)}
    expected = item or parent  # an item is decided with its producer, and a name is more specific
    if expected:
        assert actions == {expected}
        assert planned.plan.decisions[results[0].index].origin is Origin.HINT
    assert len(actions) == 1
    kept = {v.index for v in planned.kept}
    if expected == "save":
        assert kept & {v.index for v in items}
    if expected == "recompute":
        assert not kept & {v.index for v in (*results, *items)}


def again(ctx, op, *args, **kwargs):
    attention = "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_RECOMPUTE if attention else CheckpointPolicy.PREFER_SAVE


class Selective(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def part(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, again)
        return x + checkpoint(self.part, x, use_reentrant=False, context_fn=contexts).sin()


@pytest.mark.parametrize("ac", [{"stage_size": "auto"}, {"stage_size": "1 B"}], ids=str)
def test_a_user_who_recomputes_attention_wins_over_the_automatic_part(plan, ac):
    planned = plan(Selective(), (1,), save=["ATTENTION"], **ac)
    (attention,) = [
        v for v in planned.facts.forward if "scaled_dot" in v.captured_op and v.follows is None
    ]
    decision = planned.plan.decisions[attention.index]
    assert (decision.action, decision.origin) == ("recompute", Origin.HINT)
    assert "MUST_RECOMPUTE" in decision.reason
    assert "ACConfig saves ATTENTION" in [w.reason for w in decision.overridden]
    assert not [v for v in planned.kept if root_of(planned.facts, v.index) == attention.index]
