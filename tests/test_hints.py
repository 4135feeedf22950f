from functools import partial

import pytest
import torch
from hypothesis import given
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autop_ac.annotate import ac_region
from autop_ac.capture.joint import Port
from autop_ac.capture.marks import take_marks
from autop_ac.config import ACConfig
from autop_ac.graph.facts import Facts, Value
from autop_ac.policies import MATMUL
from autop_ac.recompute.catalog import Captured
from autop_ac.recompute.hints import (
    CheckpointWish,
    ResolvedHints,
    resolve_hints,
    rule_wishes,
    wishes_for_values,
)
from autop_ac.recompute.plan import Origin, Wish

from .strategies import facts as random_facts
from .test_annotate import Module, joint

aten = torch.ops.aten
X = torch.randn(2, 4)


def resolved(model):
    gm = joint(model, X)
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


# ---- to local values --------------------------------------------------------------------------------

SAVE = Wish("save", Origin.HINT, "kept")
AGAIN = Wish("recompute", Origin.HINT, "again")


def local(*nodes):
    """Facts of nodes, numbered from 1, as dicts; 0 is an input."""
    values = [Value(0, "x", "placeholder", "input", role="input")]
    for i, node in enumerate(nodes, start=1):
        fields = {"op": "aten.op.default", "side": "forward", "inputs": (i - 1,), **node}
        values.append(Value(index=i, name=f"v{i}", **fields))
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
    assert carried(facts, SAVE, AGAIN) == {1: (AGAIN,), 2: (SAVE,)}
    # through a view of the value too
    facts = local(
        MM, {"origin": "view", "follows": 1}, reduce, {**MOVED, "follows": 3}, {"origin": "s"}
    )
    assert carried(facts, SAVE) == {3: (SAVE,)}


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
