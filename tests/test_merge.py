from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autop_ac.graph.facts import Facts, Value
from autop_ac.recompute.hints import CheckpointWish, root_of
from autop_ac.recompute.merge import decide
from autop_ac.recompute.plan import Origin, Wish

from .strategies import facts as random_facts

ACTIONS = ("save", "recompute")


def wish(action, origin=Origin.HINT, prefer=False):
    return Wish(action, origin, f"{origin.name} {action}", prefer=prefer)


@st.composite
def settings(draw):
    """Facts, and what every origin asks of them."""
    facts = draw(random_facts())
    own = [v.index for v in facts.forward]
    some = st.frozensets(st.sampled_from(own))

    def wishes(origin):
        many = st.lists(st.builds(wish, st.sampled_from(ACTIONS), st.just(origin)), min_size=1,
                        max_size=3).map(tuple)  # fmt: skip
        return draw(st.dictionaries(st.sampled_from(own), many))

    # what the contract holds is never random
    contract = frozenset(
        i for i in draw(some)
        if not any(v.random or v.effectful or v.reads_mutated
                   for v in facts.forward if root_of(facts, v.index) == root_of(facts, i))
    )  # fmt: skip
    return facts, {
        "contract": contract,
        "hints": wishes(Origin.HINT),
        "rules": wishes(Origin.RULE),
        "auto": {i: ws[0] for i, ws in wishes(Origin.AUTO).items()},
        "default_saved": draw(some),
        "reshard_after_forward": draw(st.booleans()),
        "enable": draw(st.booleans()),
    }


@given(settings())
def test_p1_each_forward_value_has_exactly_one_decision(given):
    facts, asked = given
    decisions = decide(facts, **asked)
    assert list(decisions) == [v.index for v in facts.forward]
    for index, decision in decisions.items():
        assert decision.value == index
        assert decision.action in ACTIONS
        assert isinstance(decision.origin, Origin)
        assert decision.reason


@given(settings())
def test_p2_the_contract_holds_whatever_is_asked(given):
    facts, asked = given
    decisions = decide(facts, **asked)
    action = "recompute" if asked["reshard_after_forward"] else "save"
    for index in asked["contract"]:
        assert decisions[index].action == action
        assert decisions[index].origin is Origin.CONTRACT


@given(settings(), st.sampled_from(["rules", "auto", "default_saved"]))
def test_p3_a_lower_origin_never_changes_a_higher_decision(given, dropped):
    facts, asked = given
    before = decide(facts, **asked)
    after = decide(facts, **{**asked, dropped: type(asked[dropped])()})
    rank = {"rules": Origin.RULE, "auto": Origin.AUTO, "default_saved": Origin.DEFAULT}[dropped]
    for index, decision in before.items():
        if decision.origin < rank:
            assert replace(after[index], overridden=()) == replace(decision, overridden=())


@given(settings())
def test_p3_what_was_overridden_is_recorded(given):
    facts, asked = given
    enabled = asked["enable"]
    for index, decision in decide(facts, **asked).items():
        for name in ("hints", "rules"):
            for w in asked[name].get(index, ()) if enabled else ():
                set_aside = w.action != decision.action
                assert (w in decision.overridden) == set_aside, (name, w)
        assert all(w.action != decision.action for w in decision.overridden)


@given(settings())
def test_p4_getitem_view_and_wait_follow(given):
    facts, asked = given
    decisions = decide(facts, **asked)
    for value in facts.forward:
        if value.follows is not None and facts.values[value.follows].side == "forward":
            own, root = decisions[value.index], decisions[value.follows]
            assert (own.action, own.origin, own.reason) == (root.action, root.origin, root.reason)


@given(settings())
def test_p6_what_cannot_be_recomputed_is_saved(given):
    facts, asked = given
    decisions = decide(facts, **asked)
    for v in facts.forward:
        if v.random or v.effectful or v.reads_mutated:
            assert decisions[v.index].action == "save"
            assert decisions[v.index].origin is Origin.CORRECTNESS


@given(settings())
def test_p7_repeating_gives_the_same_decisions(given):
    facts, asked = given
    assert dict(decide(facts, **asked)) == dict(decide(facts, **asked))


def chain(*changes):
    """A parameter, then forward values that each read the one before."""
    values = [Value(0, "p", "placeholder", "input", role="parameter", bytes=4, storages=(0,))]
    for i, change in enumerate(changes, start=1):
        fields = {"op": "aten.sin.default", "bytes": 4, "storages": (i,), **change}
        values.append(Value(index=i, name=f"v{i}", side="forward", inputs=(i - 1,), **fields))
    return Facts(tuple(values), (len(values) - 1,), (), (4,) * len(values))


NOTHING = {
    "contract": frozenset(), "hints": {}, "rules": {}, "auto": {}, "default_saved": frozenset()
}  # fmt: skip


def decided(facts, **asked):
    return decide(facts, **{**NOTHING, **asked})


def test_the_order_of_precedence():
    ladder = {
        "default_saved": frozenset({1}),
        "auto": {1: wish("recompute", Origin.AUTO)},
        "rules": {1: (wish("save", Origin.RULE),)},
        "hints": {1: (wish("recompute"),)},
        "contract": frozenset({1}),
    }
    asked, seen = {}, []
    for name, value in ladder.items():
        asked[name] = value
        got = decided(chain({}), **asked, reshard_after_forward=False)[1]
        seen.append((got.origin, got.action))
    got = decided(chain({"random": True}), **asked)[1]
    seen.append((got.origin, got.action))
    assert seen == [
        (Origin.DEFAULT, "save"), (Origin.AUTO, "recompute"), (Origin.RULE, "save"),
        (Origin.HINT, "recompute"), (Origin.CONTRACT, "save"), (Origin.CORRECTNESS, "save"),
    ]  # fmt: skip
    # the contract's own wish is named among what correctness set aside
    assert [w.origin for w in got.overridden] == [Origin.CONTRACT, Origin.HINT, Origin.AUTO]


def test_the_first_of_several_hints_wins_and_the_other_is_kept():
    first, second = wish("save"), wish("recompute")
    got = decided(chain({}), hints={1: (first, second)})[1]
    assert (got.action, got.reason, got.overridden) == ("save", first.reason, (second,))


def test_a_default_that_keeps_a_view_keeps_its_base():
    facts = chain({}, {"op": "aten.view.default", "bytes": 0, "storages": (1,), "follows": 1})
    assert {d.action for d in decided(facts, default_saved=frozenset({2})).values()} == {"save"}


def test_a_view_of_an_input_is_decided_by_itself():
    facts = chain({"op": "aten.t.default", "bytes": 0, "storages": (0,), "follows": 0})
    assert decided(facts, hints={1: (wish("save"),)})[1].origin is Origin.HINT


@pytest.mark.parametrize("enable", [True, False])
def test_without_ac_only_tags_of_torch_stay(enable):
    tag = CheckpointWish("recompute", Origin.HINT, "torch.utils.checkpoint")
    asked = {
        "hints": {1: (tag,), 2: (wish("recompute"),)},
        "rules": {3: (wish("recompute", Origin.RULE),)},
        "auto": {4: wish("recompute", Origin.AUTO)},
        "default_saved": frozenset({1, 2, 3, 4}),
    }
    got = decided(chain({}, {}, {}, {}), **asked, enable=enable)
    assert got[1].action == "recompute"
    assert [got[i].action for i in (2, 3, 4)] == ["recompute" if enable else "save"] * 3
