from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autop_ac import AutoParallel, fake_mesh
from autop_ac.annotate import RegionSpec, ac_region, checkpoint_name
from autop_ac.capture.joint import Port
from autop_ac.capture.marks import take_marks
from autop_ac.config import ACConfig
from autop_ac.errors import HintError
from autop_ac.graph.facts import Facts, Value
from autop_ac.policies import MATMUL, Selector, every
from autop_ac.recompute.catalog import Captured, selected
from autop_ac.recompute.hints import (
    CheckpointWish,
    ResolvedHints,
    resolve_hints,
    rule_wishes,
    wishes_for_values,
)
from autop_ac.recompute.plan import Origin, Wish
from autop_ac.recompute.scopes import region_scope

from .strategies import facts as random_facts
from .test_annotate import Module, joint

aten = torch.ops.aten
X = torch.randn(2, 4)


def resolved(model):
    return resolved_of(model, X)


def resolved_of(model, *args):
    """Hints of a model, resolved as `AutoParallel` does."""
    gm = joint(model, *args)
    take_marks(gm)
    holders = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    ports = {n: Port("tangent" if n.startswith("tangents") else "input", n) for n in holders}
    return resolve_hints(gm, ports)


def asked(hints, name):
    return [(w.action, w.reason) for w in hints.wishes.get(name, ())]


class Selective(Module):
    def forward(self, x):
        x = x.exp()
        with ac_region("a", save=[aten.mm], recompute=[aten.sin]):
            x = self.a(x).sin().cos()
        return x.tanh()


def test_selectors_the_rest_and_what_enters():
    hints = resolved(Selective())
    assert asked(hints, "mm") == [("save", 'ac_region "a" saves aten.mm')]
    assert asked(hints, "sin") == [("recompute", 'ac_region "a" recomputes aten.sin')]
    assert asked(hints, "cos") == [("recompute", 'ac_region "a" recomputes the rest')]
    assert asked(hints, "exp") == [("save", 'enters ac_region "a"')]
    assert asked(hints, "tanh") == []
    assert asked(hints, "t") == []  # a view of the weight
    assert hints.messages == ()
    (wish,) = hints.wishes["mm"]
    assert (wish.origin, wish.prefer) == (Origin.HINT, False)
    assert wish.source.endswith(f"test_hints.py:{Selective.forward.__code__.co_firstlineno + 2}")
    assert list(hints.wishes) == ["exp", "mm", "sin", "cos"]


def with_region(**settings):
    class One(Module):
        def forward(self, x):
            with ac_region("r", **settings):
                return self.a(x.exp()).sin()

    return One()


@pytest.mark.parametrize(
    ("settings", "actions"),
    [
        ({}, ("recompute", "recompute", "recompute")),
        ({"save": MATMUL}, ("recompute", "save", "recompute")),
        ({"recompute": "aten.sin"}, (None, None, "recompute")),
        ({"recompute": "aten.sin", "otherwise": "save"}, ("save", "save", "recompute")),
        ({"save": MATMUL, "otherwise": "auto"}, (None, "save", None)),
        ({"otherwise": "save", "prefer": True}, ("save", "save", "save")),
    ],
)
def test_otherwise(settings, actions):
    hints = resolved(with_region(**settings))
    for name, action in zip(("exp", "mm", "sin"), actions, strict=True):
        wishes = hints.wishes.get(name, ())
        assert [w.action for w in wishes] == ([action] if action else [])
        assert all(w.prefer == settings.get("prefer", False) for w in wishes)


class Nested(Module):
    def forward(self, x):
        with ac_region("outer", recompute=[aten.mm]):
            x = self.a(x).exp()
            with ac_region("inner", save=[aten.mm]):
                x = self.a(x).sin()
            with ac_region("auto", recompute=[aten.cos]):
                return self.a(x).tanh()


def test_the_inner_region_wins_and_the_outer_comes_after():
    hints = resolved(Nested())
    outer = ("recompute", 'ac_region "outer" recomputes aten.mm')
    assert asked(hints, "mm") == [outer]
    assert asked(hints, "mm_1") == [("save", 'ac_region "inner" saves aten.mm'), outer]
    # the rest of the inner one is left to later parts, and so to the outer one first
    assert asked(hints, "mm_2") == [outer]
    assert asked(hints, "exp") == [("save", 'enters ac_region "inner"')]


class Layers(Module):
    def forward(self, x):
        for _ in range(3):
            with ac_region("layer"):
                x = self.a(x).sin()
        return x


class Around(Module):
    def forward(self, x):
        with ac_region("model"):
            for _ in range(2):
                x = x.exp()
                with ac_region("part"):
                    x = self.a(x).sin()
        return x


class Named(Module):
    def forward(self, x):
        with ac_region("first", recompute=[aten.sin]):
            x = self.a(x).sin()
        with ac_region("second"):
            return self.a(x).cos()


def test_what_enters_a_region_goes_before_the_rest_of_the_one_before_it():
    hints = resolved(Layers())
    for name in ("sin", "sin_1"):
        assert [w.action for w in hints.wishes[name]] == ["save", "recompute"]
    assert [w.action for w in hints.wishes["sin_2"]] == ["recompute"]


def test_what_enters_yields_to_a_region_around_both_and_to_a_named_operator():
    hints = resolved(Around())
    assert [w.action for w in hints.wishes["exp"]] == ["recompute", "save"]
    assert [w.action for w in resolved(Named()).wishes["sin"]] == ["recompute", "save"]


class Checkpoints(Module):
    policy = None

    def part(self, x):
        return self.a(x.sin()).exp()

    def forward(self, x):
        contexts = {}
        if self.policy is not None:
            contexts["context_fn"] = partial(create_selective_checkpoint_contexts, self.policy)
        x = checkpoint(self.part, x.cos(), use_reentrant=False, **contexts)
        return checkpoint(self.part, x, use_reentrant=False, **contexts)


def test_a_plain_checkpoint_binds_and_keeps_what_enters():
    hints = resolved(Checkpoints())
    for name in ("sin", "mm", "sin_1", "mm_1", "exp_1"):
        (wish,) = hints.wishes[name]
        assert (wish.action, wish.prefer) == ("recompute", False)
        assert isinstance(wish, CheckpointWish)
        assert wish.reason == "torch.utils.checkpoint recomputes it"
    assert asked(hints, "cos") == [("save", "enters torch.utils.checkpoint")]
    assert [w.action for w in hints.wishes["exp"]] == ["save", "recompute"]


def prefer_all(ctx, op, *args, **kwargs):
    if op is aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    if op is aten.sin.default:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_SAVE


@pytest.mark.filterwarnings("ignore")
def test_a_selective_checkpoint_orders_and_prefers():
    model = Checkpoints()
    model.policy = prefer_all
    hints = resolved(model)
    found = {
        n: (hints.wishes[n][0].action, hints.wishes[n][0].prefer) for n in ("mm", "sin", "exp_1")
    }
    assert found == {"mm": ("save", False), "sin": ("recompute", False), "exp_1": ("save", True)}
    model.policy = [aten.mm.default]
    hints = resolved(model)
    found = {
        n: (hints.wishes[n][0].action, hints.wishes[n][0].prefer) for n in ("mm", "sin", "exp_1")
    }
    assert found == {
        "mm": ("save", False),
        "sin": ("recompute", True),
        "exp_1": ("recompute", True),
    }


class RegionInCheckpoint(Module):
    def part(self, x):
        x = x.sin()
        with ac_region("inside", save=[aten.mm]):
            x = self.a(x)
        return x.exp()

    def forward(self, x):
        with ac_region("outside", save=[aten.mm, aten.sin, aten.cos]):
            return checkpoint(self.part, x, use_reentrant=False).cos()


def test_regions_inside_and_around_a_checkpoint():
    hints = resolved(RegionInCheckpoint())
    assert [w.reason for w in hints.wishes["mm"]] == [
        'ac_region "inside" saves aten.mm',
        "torch.utils.checkpoint recomputes it",
        'ac_region "outside" saves aten.mm',
    ]
    assert [w.action for w in hints.wishes["sin"]][:2] == ["recompute", "save"]


class Biased(Module):
    def forward(self, x):
        for _ in range(3):
            with ac_region("mlp", save=[aten.mm]):
                x = self.b(self.b(self.a(x)).sin())
        return x


class Missing(Module):
    def forward(self, x):
        with ac_region("m", save=[aten.linear, "aten.t", aten.relu6]):
            return self.b(self.a(x).relu())


def test_a_hint_that_matches_some_of_a_kind_is_told_once_with_counts():
    (message,) = resolved(Biased()).messages
    line = Biased.forward.__code__.co_firstlineno + 2
    assert message == (
        f'ac_region "mlp" at {__file__}:{line}: 3 mm kept, 6 addmm of this region are not; '
        "MATMUL covers both"
    )


def test_a_hint_that_matches_nothing_names_the_nearest():
    linear, view, near = resolved(Missing()).messages
    assert (
        "save=aten.linear matches none of the 3 operators of this region; MATMUL covers" in linear
    )
    assert "save=aten.t is ignored: its 2 results are views" in view
    assert near.endswith("the nearest operator here is aten.relu")


def test_hints_are_on_the_forward_side_only_and_leave_the_graph_alone():
    gm = joint(Selective(), X)
    before = [(n.name, repr(n.meta.get("custom")), n.meta.get("recompute")) for n in gm.graph.nodes]
    hints = resolve_hints(gm, {})
    back = {n.name for n in gm.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"}
    assert back and not back & set(hints.wishes)
    after = [(n.name, repr(n.meta.get("custom")), n.meta.get("recompute")) for n in gm.graph.nodes]
    assert before == after


# ---- names and every ------------------------------------------------------------------------


class Names(Module):
    settings = {}

    def forward(self, x):
        early = checkpoint_name(x.exp(), "early")
        with ac_region("r", **self.settings):
            q = checkpoint_name(self.a(early), "q")
            v = checkpoint_name(self.b(q).view(4, 2), "v")
            s = checkpoint_name(v.sin(), "s")
            return checkpoint_name(checkpoint_name(s, "s2").cos(), "c").view(2, 4)


def names_with(**settings):
    model = Names()
    model.settings = settings
    return resolved(model)


def test_a_name_selects_its_value():
    hints = names_with(save=["q", "s2"])
    assert asked(hints, "mm") == [("save", 'ac_region "r" saves q')]
    assert asked(hints, "sin") == [("save", 'ac_region "r" saves s2')]
    assert asked(hints, "cos") == [("recompute", 'ac_region "r" recomputes the rest')]
    assert hints.messages == ()
    hints = names_with(recompute="q", otherwise="save")
    assert [w.action for n in ("mm", "addmm", "sin") for w in hints.wishes[n]] == [
        "recompute", "save", "save",
    ]  # fmt: skip


def test_a_named_view_is_its_base():
    hints = names_with(save=["v"])
    assert asked(hints, "addmm") == [("save", 'ac_region "r" saves v, a view of it')]
    assert asked(hints, "view") == []
    assert hints.messages == ()


def test_a_name_goes_before_every_and_that_before_an_operator():
    hints = names_with(save=[MATMUL], recompute=["q"])
    assert [hints.wishes[n][0].action for n in ("mm", "addmm")] == ["recompute", "save"]
    hints = names_with(save=[aten.sin], recompute=[every(2, "aten.sin")])
    assert [w.action for w in hints.wishes["sin"]] == ["recompute"]


def test_a_view_of_what_is_outside_speaks_of_that():
    class ViewInside(Module):
        def forward(self, x):
            x = self.a(x).exp()
            with ac_region("r", recompute=["v"], otherwise="recompute"):
                return checkpoint_name(x.view(4, 2), "v").sin()

    hints = resolved(ViewInside())
    assert [(w.action, w.reason) for w in hints.wishes["exp"]] == [
        ("recompute", 'ac_region "r" recomputes v, a view of it'),
        ("save", 'enters ac_region "r"'),
    ]


def test_two_names_of_one_value_that_contradict_are_an_error_with_both_lines():
    first = Names.forward.__code__.co_firstlineno
    message = (
        rf'ac_region "r" at .*test_hints.py:{first + 2} contradicts itself: save=s and '
        rf"recompute=s2 are names of one value, sin, at .*test_hints.py:{first + 5}"
    )
    with pytest.raises(HintError, match=message):
        names_with(save=["s"], recompute=["s2"])
    names_with(save=["s", "s2"])


class NamedInput(Module):
    def forward(self, x):
        x = checkpoint_name(x, "x")
        w = checkpoint_name(self.a.weight.t(), "w")
        with ac_region("r", save=["x", "w", "early", "qq", "mm", "attention"]):
            q = checkpoint_name(x @ w, "q")
        return checkpoint_name(q.sin(), "early")


def test_names_that_match_nothing_say_where_the_value_is_or_what_is_nearest():
    x, w, early, near, operator, group = resolved(NamedInput()).messages
    line = NamedInput.forward.__code__.co_firstlineno + 3
    where = f'ac_region "r" at {__file__}:{line}: save='
    kept = "is ignored: it names an input or a weight, or a view of one, kept anyway"
    assert (x, w) == (f"{where}x {kept}", f"{where}w {kept}")
    outside = "matches nothing of this region: the 1 values of that name are outside of it"
    assert early == f"{where}early {outside}"
    nothing = "is the name of none of the 1 values of this region"
    assert near == f"{where}qq {nothing}; the nearest name is q"
    assert operator == f"{where}mm {nothing}; the operator is written aten.mm"
    assert group == f"{where}attention {nothing}; the group is written ATTENTION"


class SevenInFour(Module):
    """Seven matmuls in each of four layers: an odd number, so that one counter would drift."""

    settings = {}
    around = "layer"

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(7)])
            for _ in range(4)
        )

    def forward(self, x):
        if self.around == "model":
            with ac_region("seven", **self.settings):
                for layer in self.layers:
                    x = layer(x.sin())
                return x
        for layer in self.layers:
            with ac_region("seven", **self.settings):
                x = layer(x.sin())
        return x


@pytest.mark.parametrize("around", ["model", "layer"])
@pytest.mark.parametrize("op", [aten.mm, "MATMUL", aten.mm.default])
def test_p15_every_second_of_seven_matmuls_is_the_same_in_each_layer(around, op):
    model = SevenInFour()
    model.around, model.settings = around, {"save": [every(2, op)]}
    hints = resolved(model)
    names = ["mm", *[f"mm_{i}" for i in range(1, 28)]]
    actions = [hints.wishes[n][0].action for n in names]
    by_layer = [actions[i : i + 7] for i in range(0, 28, 7)]
    assert by_layer == [["save", "recompute"] * 3 + ["save"]] * 4
    assert hints.messages == ()


class Again(Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(*[
            torch.nn.Linear(4, 4, bias=False) for _ in range(3)])])  # fmt: skip

    def forward(self, x):
        with ac_region("again", save=[every(2, aten.mm)]):
            for _ in range(2):
                x = self.layers[0](x)
        return x


def test_each_call_of_a_shared_layer_is_counted_anew():
    hints = resolved(Again())
    actions = [hints.wishes[n][0].action for n in ("mm", *(f"mm_{i}" for i in range(1, 6)))]
    assert actions == ["save", "recompute", "save"] * 2


ops = st.sampled_from(
    ("aten.mm.default", "aten.addmm.default", "aten.sin.default", "aten.t.default")
)
layers_of_ops = st.lists(st.tuples(ops, st.sampled_from(("", "q", "r"))), min_size=1, max_size=9)
chosen_by = st.builds(
    Selector, st.sampled_from(("aten.mm", "MATMUL", "aten.sin", "q")), st.integers(1, 4)
)


def layered(layer, count, around=()):
    """`count` equal layers of operators with names, between others at the root."""
    values = [Captured(f"in{i}", op, base=f"in{i}") for i, op in enumerate(around)]
    for k in range(count):
        for j, (op, name) in enumerate(layer):
            node = f"l{k}_{j}"
            base = f"l{k}_{j - 1}" if op == "aten.t.default" and j else node
            values.append(
                Captured(node, op, f"layers.{k}.w{j}", f"layers.{k}", (name,) if name else (), base)
            )
    return values


@given(layers_of_ops, st.integers(2, 4), st.lists(ops, max_size=3), st.lists(chosen_by, max_size=3),
       st.lists(chosen_by, max_size=3))  # fmt: skip
def test_p15_equal_layers_get_equal_decisions(layer, count, around, save, recompute):
    values = layered(layer, count, around)
    spec = RegionSpec("r", tuple(save), tuple(recompute), "recompute", False, "f.py:1")
    try:
        scope = region_scope(spec, values)
    except HintError:  # the same names saved and recomputed: ac_region refuses it before
        scope = region_scope(RegionSpec("r", tuple(save), (), "recompute", False, "f.py:1"), values)
    facts, catalog = facts_of(values), tuple(values)
    rules = [f"::{s}=save" for s in save] + [f"layers.*::{s}=recompute" for s in recompute]
    by_rule, _ = rule_wishes(facts, ACConfig(rules=rules), catalog)
    places = {v.name: v.index for v in facts.values}

    def of_layer(k):
        nodes = [f"l{k}_{j}" for j in range(len(layer))]
        return [scope.own.get(n) for n in nodes], [by_rule.get(places[n]) for n in nodes]

    for k in range(1, count):
        assert of_layer(k) == of_layer(0)


@given(layers_of_ops, st.integers(1, 4), chosen_by)
def test_every_takes_the_first_of_each_n_of_a_block(layer, count, selector):
    values = layered(layer, count)
    for k in range(count):
        block = [v for v in values if v.block == f"layers.{k}"]
        of_kind = [v for v in block if selector.matches(v.op, v.names)]
        if not selector.is_name:
            of_kind = [v for v in of_kind if v.base == v.name]
        chosen = [v for v in selected(selector, values) if v.block == f"layers.{k}"]
        assert chosen == of_kind[:: selector.every]


def facts_of(values):
    """A local graph that computes each captured value once."""
    return local(*[
        {"origin": v.name, "captured_op": v.op, "name": v.name, "module": v.module,
         "follows": None if v.base == v.name else i}
        for i, v in enumerate(values)
    ])  # fmt: skip


class Conditional(Module):
    """A region in one branch of a loop over settings, on a module that is used twice."""

    kinds = ("plain", "hinted")

    def forward(self, x):
        for kind in self.kinds:
            if kind == "hinted":
                with ac_region("branch", save=[aten.mm]):
                    x = self.a(x).sin()
            elif kind == "named":
                x = checkpoint_name(self.a(x), "n").sin()
            else:
                x = self.a(x).sin()
        return x


@pytest.mark.parametrize(
    ("kinds", "hinted"),
    [(("plain", "hinted"), {"mm_1"}), (("hinted", "plain"), {"mm"}), (("plain",), set()),
     (("hinted", "named", "hinted"), {"mm", "mm_2"})],
)  # fmt: skip
def test_a_branch_and_a_module_used_twice(kinds, hinted):
    model = Conditional()
    model.kinds = kinds
    hints = resolved(model)
    saved = {n for n, ws in hints.wishes.items() if "saves aten.mm" in ws[0].reason}
    assert saved == hinted


class CheckpointInRegion(Module):
    def part(self, x):
        return checkpoint_name(self.a(x).sin(), "inner").exp()

    def forward(self, x):
        with ac_region("outside", save=["inner", aten.mm]):
            return checkpoint(self.part, x.cos(), use_reentrant=False)


class NamedInCheckpoint(Module):
    def part(self, x):
        with ac_region("inside", save=["inner"], otherwise="auto"):
            return checkpoint_name(self.a(x).sin(), "inner").exp()

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False).tanh()


def test_names_in_a_region_around_and_inside_a_checkpoint():
    around = resolved(CheckpointInRegion()).wishes
    assert [w.action for w in around["sin"]] == ["recompute", "save"]  # the checkpoint is inside
    inside = resolved(NamedInCheckpoint()).wishes
    assert [w.action for w in inside["sin"]] == ["save", "recompute"]
    assert [w.action for w in inside["mm"]] == ["recompute"]


# ---- rules -----------------------------------------------------------------------------------


def rules_on(values, *rules, **settings):
    facts = facts_of(values)
    wishes, messages = rule_wishes(facts, ACConfig(rules=rules, **settings), tuple(values))
    names = {v.index: v.name for v in facts.values}
    return {names[i]: [(w.action, w.reason) for w in ws] for i, ws in wishes.items()}, messages


TWO = layered([("aten.mm.default", "q"), ("aten.sin.default", "")], 2, ["aten.mm.default"])


def test_the_first_rule_that_matches_holds_and_the_others_are_kept():
    wishes, messages = rules_on(
        TWO, "layers.0::aten.mm=save", "layers.*=recompute", "::aten.mm=save"
    )
    own, each, all_ = (f'rule "{r}"' for r in
                       ("layers.0::aten.mm=save", "layers.*=recompute", "::aten.mm=save"))  # fmt: skip
    assert wishes == {
        "in0": [("save", all_)],
        "l0_0": [("save", own), ("recompute", each), ("save", all_)],
        "l0_1": [("recompute", each)],
        "l1_0": [("recompute", each), ("save", all_)],
        "l1_1": [("recompute", each)],
    }
    assert messages == ()


def test_rules_by_name_and_every_go_through_views():
    named = [
        *TWO[:2],
        Captured("view", "aten.view.default", "layers.0", "layers.0", ("v",), "l0_0"),
    ]
    wishes, messages = rules_on(named, "::v=prefer_save")
    assert wishes == {"l0_0": [("save", 'rule "::v=prefer_save", on a view of it')]}
    wishes, messages = rules_on(TWO, "::MATMUL/2=save")
    assert list(wishes) == ["in0", "l0_0", "l1_0"] and messages == ()
    facts = facts_of(TWO)
    (wish,), *_ = rule_wishes(facts, ACConfig(rules="::q=prefer_save"), tuple(TWO))[0].values()
    assert (wish.prefer, wish.origin, wish.action) == (True, Origin.RULE, "save")


def test_save_and_recompute_come_after_rules_the_more_specific_first():
    wishes, _ = rules_on(
        TWO, "layers.0=recompute", save=[aten.mm], recompute=[every(2, aten.mm), "q"]
    )
    assert {n: w[0] for n, w in wishes.items()} == {
        "in0": ("recompute", "ACConfig recomputes aten.mm/2"),
        "l0_0": ("recompute", 'rule "layers.0=recompute"'),
        "l0_1": ("recompute", 'rule "layers.0=recompute"'),
        "l1_0": ("recompute", "ACConfig recomputes q"),
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["layer.*::aten.mm=save"], 'rule "layer.*::aten.mm=save": layer.* matches none of the 7 '
         "modules; the nearest is layers.*"),
        (["layers.*.attn=save"], 'rule "layers.*.attn=save": layers.*.attn matches none of the 7 '
         "modules; the nearest is layers.*"),
        (["layers.0::aten.bmm=save"], 'rule "layers.0::aten.bmm=save" matches none of the 2 operators '
         "of its modules; MATMUL covers mm"),
        (["::aten.embedding=save"], 'rule "::aten.embedding=save" matches none of the 5 operators of the '
         "model; the nearest operator here is aten.sin"),
        (["::qq=save"], 'rule "::qq=save" is the name of none of the 5 values of the model; the nearest '
         "name is q"),
        (["*::q=save", "::q/2=recompute"], 'rule "::q/2=recompute" decides nothing: each of its 2 '
         'values is taken by an earlier rule, such as "*::q=save"'),
        (["layers=save", "layers.1.w1=recompute"], 'rule "layers.1.w1=recompute" decides nothing: its '
         'value is taken by an earlier rule, such as "layers=save"'),
    ],
)  # fmt: skip
def test_a_rule_that_decides_nothing_is_told_with_counts_and_what_is_nearest(rules, message):
    _, messages = rules_on(TWO, *rules)
    assert messages == (message,)


def test_rules_that_agree_are_not_told_to_be_idle():
    assert rules_on(TWO, "layers=save", "layers.1=save", "::aten.mm=save")[1] == ()


def test_a_rule_tells_of_siblings_that_no_rule_is_about():
    mixed = layered([("aten.mm.default", ""), ("aten.addmm.default", "")], 3)
    _, (message,) = rules_on(mixed, "layers.*::aten.mm=save")
    assert message == (
        'rule "layers.*::aten.mm=save": 3 mm kept, 3 addmm of its modules are not; '
        "MATMUL covers both"
    )
    assert rules_on(mixed, "layers.*::aten.mm=save", "::aten.addmm=recompute")[1] == ()
    _, (message,) = rules_on(mixed, "layers.0::aten.mm=recompute", "layers.[12]=save")
    assert message == (
        'rule "layers.0::aten.mm=recompute": 1 mm recomputed, 1 addmm of its modules is not; '
        "MATMUL covers both"
    )


def test_a_rule_on_views_alone_is_told():
    views = layered([("aten.sin.default", ""), ("aten.t.default", "")], 1)
    _, (message,) = rules_on(views, "::aten.t=save")
    assert message.startswith(
        'rule "::aten.t=save" is ignored: its 1 results are views, which hold'
    )
    _, (message,) = rules_on(views, "layers.0.w1=save")
    assert message == (
        'rule "layers.0.w1=save" matches no operator: what its modules compute holds no memory'
    )


def test_rules_see_inserted_collectives_by_operator_and_module_only():
    reduce = {"op": "_c10d_functional.all_reduce.default", "collective": "all_reduce",
              "serves": "sin", "module": "layers.0"}  # fmt: skip
    mm = {"origin": "mm", "captured_op": "aten.mm.default", "module": "layers.0"}
    facts = local(
        mm, reduce, {"follows": 2, "serves": "sin"}, {"origin": "sin"}, {**reduce, "module": "head"}
    )

    def decided(rule):
        return sorted(rule_wishes(facts, ACConfig(rules=rule), catalog_of(facts))[0])

    assert decided("layers.0::COLLECTIVES=save") == [2]
    assert decided("::COLLECTIVES=save") == [2, 5]
    # the sum over devices of what is recomputed is recomputed too, unless a rule is about it
    assert decided("layers.0=recompute") == [1, 2]
    both = ACConfig(rules=["layers.0=recompute", "::COLLECTIVES=save"])
    wishes, _ = rule_wishes(facts, both, catalog_of(facts))
    assert [w.action for w in wishes[2]] == ["save", "recompute"]
    assert [w.action for w in wishes[5]] == ["save"]


# ---- to local values --------------------------------------------------------------------------------

SAVE = Wish("save", Origin.HINT, "kept")
AGAIN = Wish("recompute", Origin.HINT, "again")


def local(*nodes):
    """Facts of nodes, numbered from 1, as dicts; 0 is an input."""
    values = [Value(0, "x", "placeholder", "input", role="input")]
    for i, node in enumerate(nodes, start=1):
        fields = {"name": f"v{i}", "op": "aten.op.default", "side": "forward", "inputs": (i - 1,)}
        values.append(Value(index=i, **{**fields, **node}))
    return Facts(tuple(values), (len(values) - 1,), (), ())


def catalog_of(facts, **more):
    """The captured values that local ones would come from, one for each origin."""
    first = {}
    for v in facts.forward:
        if v.captured_op:
            view = v.follows is not None
            first.setdefault(
                v.origin,
                Captured(v.origin, v.captured_op, v.module, base="" if view else v.origin, **more),
            )
    return tuple(first.values())


def carried(facts, *wishes, origin="mm"):
    return dict(wishes_for_values(facts, ResolvedHints({origin: wishes})))


MM = {"origin": "mm", "captured_op": "aten.mm.default"}
MOVED = {"serves": "mm"}


def test_inserted_collectives_do_not_shift_the_count_of_the_users_own():
    reduce = "_c10d_functional.all_reduce.default"
    own = {"op": reduce, "collective": "all_reduce", "origin": "own", "captured_op": reduce}
    facts = local({"op": reduce, "collective": "all_reduce", "serves": "own"}, own)
    wishes, _ = rule_wishes(facts, ACConfig(rules="::COLLECTIVES/2=save"), catalog_of(facts))
    assert sorted(wishes) == [1, 2]


def test_a_save_goes_to_the_last_of_several_and_recompute_to_all():
    facts = local(MM, MM, MM, {"origin": "other"})
    assert carried(facts, SAVE, AGAIN) == {1: (AGAIN,), 2: (AGAIN,), 3: (SAVE, AGAIN)}


def test_a_save_of_a_value_that_ends_in_a_view_goes_to_what_the_view_follows():
    facts = local(MM, {**MM, "follows": 1}, {"origin": "other"})
    assert carried(facts, SAVE) == {1: (SAVE,)}


def test_a_save_moves_on_to_the_end_of_a_redistribution():
    reduce = {**MOVED, "collective": "all_reduce"}
    wait = {**MOVED, "follows": 2}
    facts = local(MM, reduce, wait, {"origin": "sin"})
    assert carried(facts, SAVE, AGAIN) == {1: (AGAIN,), 2: (SAVE, AGAIN)}
    assert carried(facts, AGAIN) == {1: (AGAIN,), 2: (AGAIN,)}
    # through a view of the value too
    facts = local(
        MM, {"origin": "view", "follows": 1}, reduce, {**MOVED, "follows": 3}, {"origin": "s"}
    )
    assert carried(facts, SAVE) == {3: (SAVE,)}


def test_recompute_holds_for_the_moved_copies_of_a_value_and_of_its_views_only():
    facts = local(
        MM,
        MOVED,
        {"origin": "view", "follows": 1, "inputs": (1,)},
        {**MOVED, "serves": "sin"},
        {"origin": "sin"},
        {**MOVED, "serves": "cos"},
        {"origin": "back", "side": "backward", "inputs": (4,)},
    )
    assert carried(facts, AGAIN) == {1: (AGAIN,), 2: (AGAIN,), 4: (AGAIN,)}


def test_a_save_moves_through_pieces_that_meet_again():
    facts = local(
        MM,
        {**MOVED, "collective": "all_gather_into_tensor"},
        {**MOVED, "follows": 2},
        {**MOVED, "op": "aten.split.Tensor", "follows": 3},
        {**MOVED, "op": "getitem", "follows": 4},
        {**MOVED, "op": "getitem", "follows": 4, "inputs": (4,)},
        {**MOVED, "op": "aten.cat.default", "inputs": (5, 6)},
        {"origin": "sin"},
    )
    assert carried(facts, SAVE) == {7: (SAVE,)}


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_save_stays_where_something_else_reads_the_value_too(side):
    facts = local(MM, MOVED, {"origin": "sin"}, {"origin": "cos", "inputs": (1,), "side": side})
    assert carried(facts, SAVE) == {1: (SAVE,)}


def test_a_save_stays_where_moves_end_in_several_values():
    facts = local(MM, MOVED, {**MOVED, "inputs": (1,)}, {"origin": "sin", "inputs": (2, 3)})
    assert carried(facts, SAVE) == {1: (SAVE,)}


GATHER = {"op": "_c10d_functional.all_gather_into_tensor.default",
          "collective": "all_gather_into_tensor"}  # fmt: skip


def scoped(facts, spec, *inside):
    """What a region that holds these captured nodes asks of local values."""
    scope = region_scope(spec, [Captured(n, "aten.op.default", base=n) for n in inside])
    wishes = {n: (w,) for n, (w, _) in scope.own.items()}
    hints = ResolvedHints(wishes, scopes=(scope,))
    return {i: [(w.action, w.reason) for w in ws]
            for i, ws in wishes_for_values(facts, hints).items()}  # fmt: skip


def region_of(save=(), recompute=(), otherwise="recompute"):
    parsed = (tuple(map(Selector, side)) for side in (save, recompute))
    return RegionSpec("r", *parsed, otherwise, False, "f.py:1")


def test_what_is_inserted_for_a_node_in_a_region_is_in_the_region():
    facts = local(
        {"origin": "before"},
        {**GATHER, "serves": "in"},
        {"follows": 2, "serves": "in"},
        {"origin": "in"},
        {**GATHER, "serves": "after"},
        {"origin": "after"},
        {**GATHER, "serves": "in", "parameter": "w", "inputs": (0,)},
    )
    rest = ("recompute", 'ac_region "r" recomputes all of it')
    # the copy of what comes out is a copy of what is recomputed; parameters have their contract
    assert scoped(facts, region_of(), "in") == {2: [rest], 4: [rest], 5: [rest]}
    assert scoped(facts, region_of(otherwise="auto"), "in") == {}


def test_a_region_saves_collectives_that_sharding_inserts():
    facts = local({"origin": "before"}, {**GATHER, "serves": "in"}, {"follows": 2, "serves": "in"},
                  {"origin": "in"}, {**GATHER, "serves": "in2"}, {"origin": "in2"})  # fmt: skip
    got = scoped(facts, region_of(save=["COLLECTIVES"]), "in", "in2")
    assert [got[i][0] for i in (2, 5)] == [("save", 'ac_region "r" saves COLLECTIVES')] * 2
    assert got[4] == [("recompute", 'ac_region "r" recomputes the rest')]
    second = RegionSpec("r", (every(2, "COLLECTIVES"),), (), "recompute", False, "f.py:1")
    got = scoped(facts, second, "in", "in2")
    assert [got[i][0][0] for i in (2, 5)] == ["save", "recompute"]
    # whether there are any depends on the sharding: no fault of the hint
    assert resolved(with_region(save=["COLLECTIVES"])).messages == ()


@given(random_facts())
def test_wishes_go_to_forward_values_that_decide_for_themselves(facts):
    from dataclasses import replace

    values = tuple(
        replace(v, origin=f"c{v.index // 2}", captured_op=v.op) if v.side != "input" else v
        for v in facts.values
    )
    facts = replace(facts, values=values)
    hints = ResolvedHints({f"c{i}": (SAVE, AGAIN) for i in range(len(values))})
    decides = {
        v.index for v in facts.forward
        if v.follows is None or facts.values[v.follows].side != "forward"
    }  # fmt: skip
    assert set(wishes_for_values(facts, hints)) <= decides
    config = ACConfig(save="aten.view", recompute=["aten.rand_like", "COLLECTIVES"])
    rules, _ = rule_wishes(facts, config, catalog_of(facts))
    assert set(rules) <= decides


def test_rules_by_the_captured_operator():
    facts = local(
        {"op": "aten.bmm.default", "origin": "mm", "captured_op": "aten.mm.default"},
        {"origin": "sin", "captured_op": "aten.sin.default"},
        {"op": "_c10d_functional.all_reduce.default", "collective": "all_reduce", "serves": "sin"},
        {"origin": "addmm", "captured_op": "aten.addmm.default"},
    )
    config = ACConfig(save=[aten.mm], recompute=["COLLECTIVES", "aten.bmm"])
    wishes, messages = rule_wishes(facts, config, catalog_of(facts))
    assert {i: [(w.action, w.origin, w.reason) for w in ws] for i, ws in wishes.items()} == {
        1: [("save", Origin.RULE, "ACConfig saves aten.mm")],
        3: [("recompute", Origin.RULE, "ACConfig recomputes COLLECTIVES")],
    }
    assert messages == (
        "ACConfig: 1 mm kept, 1 addmm of the model is not; MATMUL covers both",
        "ACConfig: recompute=aten.bmm matches none of the 4 operators of the model; "
        "MATMUL covers mm, addmm",
    )


@pytest.mark.parametrize("action", ["save", "recompute"])
def test_a_batch_norm_is_selected_by_its_name_though_it_is_made_of_other_operators(action):
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    ap = AutoParallel(model, lambda: torch.randn(16, 8), fake_mesh(2)).configure_compile("eager")
    with ap.configure_ac(stage_size=None, rules=[f"::aten.batch_norm={action}"]):
        ap.optimize_placement()
    report = ap.preview()
    assert report.basis.plan.notes == ()
    values, decisions = report.basis.facts.values, report.basis.plan.decisions.values()
    told = [d for d in decisions if "aten.batch_norm" in d.reason]
    assert len(told) > 10 and {d.origin for d in told} == {Origin.RULE}
    # of no module is what is gathered of its result
    assert {"1"} <= {values[d.value].module for d in told} <= {"1", ""}
    assert {d.action for d in told} == {action}
