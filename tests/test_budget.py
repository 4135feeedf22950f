"""The budget against brute force, its properties, and what it costs on repeated layers."""

import itertools
import math
import random
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autop_ac.errors import InfeasibleError
from autop_ac.graph.liveness import backward_order, profile
from autop_ac.recompute.budget import budget_curve, budget_wishes, pareto, preference_note
from autop_ac.recompute.evaluate import Evaluator
from autop_ac.recompute.hints import root_of
from autop_ac.recompute.layers import equal_layers, tied_values
from autop_ac.recompute.pareto import Curve
from autop_ac.recompute.plan import Origin, Wish
from autop_ac.recompute.relax import Relaxation
from autop_ac.recompute.stages import candidates, free_values, stage_wishes
from autop_ac.recompute.verify import closure

from .strategies import timed_facts
from .synthetic import transformer

ACTIONS = ("save", "recompute")


def outcome(facts, actions):
    """Peak, time and saved set by the definitions: the orders and the profile."""
    saved, _ = closure(facts, actions)
    again = [i for i in backward_order(facts, saved) if facts.values[i].side == "forward"]
    time = math.fsum(facts.values[i].time_s for i in again)
    return profile(facts, saved).peak_bytes, time, saved


def roots_of(facts):
    return [v.index for v in facts.forward if root_of(facts, v.index) == v.index]


def brute_force(facts, fixed):
    """Outcomes of all choices of the free values."""
    forward = free_values(facts, fixed)
    decided = {**fixed, **dict.fromkeys(forward.kept, "save")}
    return [
        outcome(facts, {**decided, **dict(zip(forward.free, chosen))})
        for chosen in itertools.product(ACTIONS, repeat=len(forward.free))
    ]


def taken(facts, fixed, wishes):
    return {**fixed, **{i: w.action for i, w in wishes.items()}}


@st.composite
def fixed_in_part(draw, most_free=8, max_forward=12):
    """Facts, and fixed actions that leave at most `most_free` values to decide."""
    facts = draw(timed_facts(max_forward=max_forward))
    roots = roots_of(facts)
    fixed = draw(st.dictionaries(st.sampled_from(roots), st.sampled_from(ACTIONS), max_size=4))
    for i in free_values(facts, fixed).free[most_free:]:
        fixed[i] = "save"
    return facts, fixed


@given(timed_facts(), st.data())
def test_an_outcome_is_that_of_closure_profile_and_order(facts, data):
    roots = roots_of(facts)
    actions = {i: data.draw(st.sampled_from(ACTIONS)) for i in roots}
    free = [i for i in roots if data.draw(st.booleans())]
    evaluate = Evaluator(facts, {i: a for i, a in actions.items() if i not in free}, free)
    got = evaluate(evaluate.mask([i for i in free if actions[i] == "save"]))
    assert (got.peak_bytes, got.time_s, got.saved) == outcome(facts, actions)


def test_an_outcome_is_exact_on_layers():
    facts = transformer(3)
    forward = free_values(facts, {})
    fixed = dict.fromkeys(forward.kept, "save")
    evaluate = Evaluator(facts, fixed, forward.free)
    draw = random.Random(0)
    for _ in range(40):
        chosen = {i: draw.choice(ACTIONS) for i in forward.free}
        got = evaluate(evaluate.mask([i for i, a in chosen.items() if a == "save"]))
        assert (got.peak_bytes, got.time_s, got.saved) == outcome(facts, {**fixed, **chosen})


@settings(max_examples=40)
@given(fixed_in_part())
def test_p10_equal_to_brute_force(drawn):
    facts, fixed = drawn
    every = brute_force(facts, fixed)
    smallest = min(peak for peak, _, _ in every)
    for budget in sorted({peak for peak, _, _ in every}):
        wishes, result = budget_wishes(facts, budget, fixed)
        least = min(time for peak, time, _ in every if peak <= budget)
        peak, time, _ = outcome(facts, taken(facts, fixed, wishes))
        assert peak == result.peak_bytes <= budget
        assert time == result.recompute_time_s == result.lower_bound_s == least
        assert result.exact and result.gap == 0.0
        assert all(w.origin is Origin.AUTO and w.reason for w in wishes.values())
    with pytest.raises(InfeasibleError, match="the smallest peak that can be reached is") as error:
        budget_wishes(facts, smallest - 1, fixed)
    assert (error.value.budget_bytes, error.value.smallest_bytes) == (smallest - 1, smallest)


def test_p10_equal_to_brute_force_with_twelve_free_values():
    facts = transformer(1, head=False)
    every = free_values(facts, {}).free
    fixed = dict.fromkeys(every[12:], "save")
    found = brute_force(facts, fixed)
    for budget in sorted({peak for peak, _, _ in found})[::5]:
        _, result = budget_wishes(facts, budget, fixed)
        assert result.recompute_time_s == min(t for p, t, _ in found if p <= budget)


@settings(max_examples=25)
@given(fixed_in_part(most_free=7))
def test_the_bound_is_below_the_optimum_and_the_search_near_it(drawn):
    """The search for large graphs, on small ones: within the budget, and above the proven bound."""
    facts, fixed = drawn
    forward = free_values(facts, fixed)
    evaluate = Evaluator(facts, {**fixed, **dict.fromkeys(forward.kept, "save")}, forward.free)
    every = [evaluate(bytes(m)) for m in itertools.product((0, 1), repeat=len(forward.free))]
    curve = Curve(evaluate, exact=-1)
    relaxation = Relaxation(evaluate)
    steps = [("backward", k) for k in range(evaluate.end)]
    steps += [("forward", v.index) for v in facts.forward]
    for budget in sorted({o.peak_bytes for o in every}):
        least = min(o.time_s for o in every if o.peak_bytes <= budget)
        for nodes in (0, 20):
            relaxed = relaxation.within(budget, steps, nodes)
            assert relaxed is not None
            assert relaxed.time_s <= least + 1e-6 * (1 + least)
        point = curve.at(budget)
        if point is None:
            assert budget < curve.smallest_bytes
            continue
        assert point.peak_bytes <= budget and point.recompute_time_s >= least
        assert curve.bound_s(point, budget) <= least + 1e-6 * (1 + least)


@settings(max_examples=6)
@given(st.just(2), st.booleans(), st.sampled_from((4, 6000)), st.integers(0, 10**6))
def test_p10_more_budget_never_costs_time_and_less_never_raises_the_peak(
    layers, head, weight, seed
):
    facts = transformer(layers, weight=weight, head=head)
    evaluate = Evaluator(facts, {}, free_values(facts, {}).free)
    curve = Curve(evaluate)
    low, high = curve.smallest_bytes, curve.points(0)[-1].peak_bytes
    draw = random.Random(seed)
    budgets = sorted(draw.randint(low, high + 1) for _ in range(5))
    found = [curve.at(b) for b in budgets]
    for budget, point in zip(budgets, found):
        assert point.peak_bytes <= budget
    for smaller, larger in itertools.pairwise(found):
        assert smaller.recompute_time_s >= larger.recompute_time_s
        assert smaller.peak_bytes <= larger.peak_bytes


def scaled(facts, factor):
    return replace(
        facts,
        values=tuple(replace(v, bytes=factor * v.bytes) for v in facts.values),
        storage_bytes=tuple(factor * b for b in facts.storage_bytes),
        parameter_bytes=factor * facts.parameter_bytes,
    )


@settings(max_examples=6)
@given(st.integers(2, 10**9), st.integers(1, 5), st.integers(1, 3))
def test_p9_sizes_times_a_whole_number_give_the_same_decisions(factor, sixth, layers):
    facts = transformer(layers)
    curve = pareto(facts, {}, depth=0)
    low, high = curve[0].peak_bytes, curve[-1].peak_bytes
    budget = low + (high - low) * sixth // 6
    wishes, result = budget_wishes(facts, budget, {})
    again, result_again = budget_wishes(scaled(facts, factor), factor * budget, {})
    assert again == wishes
    assert result_again.peak_bytes == factor * result.peak_bytes
    assert result_again.recompute_time_s == result.recompute_time_s


def test_p7_names_and_the_order_of_sets_change_nothing():
    facts = transformer(2)
    low, high = (pareto(facts, {}, depth=0)[k].peak_bytes for k in (0, -1))
    renamed = replace(facts, values=tuple(replace(v, name=f"n{-v.index}") for v in facts.values))
    fixed = {i: "recompute" for i in free_values(facts, {}).free[:3]}
    for part in (2, 3):
        budget = low + (high - low) * part // 4
        first = budget_wishes(facts, budget, fixed)
        assert budget_wishes(renamed, budget, dict(reversed(fixed.items()))) == first


def test_runs_of_neighbouring_layers_are_one_and_the_outer_ones_their_own():
    facts = transformer(6)
    classes = equal_layers(facts, free_values(facts, {}).free)
    (layers,) = classes
    stands_for = tied_values(classes, 2)
    of = [stands_for[layer.start] for layer in layers]
    starts = [layer.start for layer in layers]
    assert of == [starts[0], starts[1], starts[1], starts[3], starts[3], starts[5]]
    for i, one in stands_for.items():
        assert facts.values[i].op == facts.values[one].op
        assert facts.values[i].bytes == facts.values[one].bytes


def decisions_by_layer(facts, wishes):
    forward = sorted(i for i in wishes)
    (layers,) = equal_layers(facts, forward)
    return [tuple(wishes[forward[k]].action for k in layer.slots) for layer in layers]


@pytest.mark.parametrize("sixth", (1, 3, 5))
def test_p15_equal_layers_are_alike_but_for_runs_of_neighbours(sixth):
    facts = transformer(6)
    low, high = (pareto(facts, {}, depth=0)[k].peak_bytes for k in (0, -1))
    wishes, result = budget_wishes(facts, low + (high - low) * sixth // 6, {})
    layers = decisions_by_layer(facts, wishes)
    runs = [key for key, _ in itertools.groupby(layers)]
    assert len(runs) == len(set(runs)), "equal decisions that are no neighbours"
    assert (len(runs) == 1) == (not result.notes)
    if result.notes:
        assert "6 equal layers" in result.notes[0]


def test_with_room_for_all_nothing_is_recomputed_and_layers_are_alike():
    facts = transformer(4)
    wishes, result = budget_wishes(facts, 10**12, {})
    assert result.recompute_time_s == result.lower_bound_s == 0.0
    assert result.exact
    assert len(set(decisions_by_layer(facts, wishes))) == 1


@pytest.mark.parametrize("head", [True, False])
def test_the_curve_falls_and_each_point_is_what_its_budget_gives(head):
    facts = transformer(2, head=head)
    curve = pareto(facts, {}, depth=4)
    assert len(curve) > 8
    for lower, higher in itertools.pairwise(curve):
        assert lower.peak_bytes < higher.peak_bytes
        assert lower.recompute_time_s > higher.recompute_time_s
    assert curve[-1].recompute_time_s == 0.0
    for point in curve[:: len(curve) // 3]:
        _, result = budget_wishes(facts, point.peak_bytes, {})
        assert result.recompute_time_s <= point.recompute_time_s
        assert profile(facts, point.saved).peak_bytes == point.peak_bytes
    with pytest.raises(InfeasibleError, match="the smallest peak found is") as error:
        budget_wishes(facts, curve[0].peak_bytes - 1, {})
    assert error.value.smallest_bytes == curve[0].peak_bytes


def others(facts):
    """Baselines: peak and time of each."""
    free = free_values(facts, {}).free
    matmuls = [i for i in free if ".mm." in facts.values[i].op]

    def save(chosen):
        return outcome(facts, {i: "save" if i in chosen else "recompute" for i in free})[:2]

    named = {facts.values[i].module for i in free}
    ends = {max(i for i in free if facts.values[i].module == m) for m in named}
    yield "each layer", save(ends)
    yield "every second matmul", save({*ends, *matmuls[::2]})
    yield "all matmuls", save({*ends, *matmuls})
    for size in candidates(facts, {}):
        wishes, _ = stage_wishes(facts, size, {})
        yield "stages", save({i for i, w in wishes.items() if w.action == "save"})
    by_worth = sorted(free, key=lambda i: -facts.values[i].time_s / max(1, facts.values[i].bytes))
    for part in range(0, len(free), 6):
        yield "time per byte", save({*ends, *by_worth[:part]})


@pytest.mark.parametrize("head", [True, False])
def test_at_the_peak_of_each_baseline_ours_takes_no_longer(head):
    facts = transformer(3, head=head)
    curve, _ = budget_curve(facts, {})
    for name, (peak, time) in others(facts):
        point = curve.at(peak)
        assert point is not None and point.peak_bytes <= peak
        assert point.recompute_time_s <= time * (1 + 1e-9), (name, peak)


@pytest.mark.parametrize(("layers", "sixths"), [(8, (1, 3, 5)), (18, (2,)), (60, (2,))])
def test_the_gap_is_small_where_the_head_holds_the_peak(layers, sixths):
    facts = transformer(layers)
    curve, _ = budget_curve(facts, {})
    low, high = curve.smallest_bytes, curve.points(0)[-1].peak_bytes
    for sixth in sixths:
        budget = low + (high - low) * sixth // 6
        point = curve.at(budget)
        assert (
            point.recompute_time_s * 0.98 <= curve.bound_s(point, budget) <= point.recompute_time_s
        )


def prefer(action, reason="the user would rather"):
    return Wish(action, Origin.HINT, reason, prefer=True)


def test_preferences_hold_where_the_budget_can_be_met_with_them():
    facts = transformer(2)
    free = free_values(facts, {}).free
    curve = pareto(facts, {})
    preferred = {i: prefer("recompute") for i in free[:4]}
    wishes, result = budget_wishes(facts, curve[-1].peak_bytes, {}, preferred)
    assert result.given_up == () and not set(preferred) & set(wishes)
    assert result.recompute_time_s > 0.0
    # saving everything by preference leaves nothing to decide: it yields to a small budget
    everything = {i: prefer("save") for i in free}
    wishes, result = budget_wishes(facts, curve[0].peak_bytes, {}, everything)
    assert result.given_up == tuple(sorted(free))
    assert set(wishes) >= set(free) and result.peak_bytes == curve[0].peak_bytes
    assert "preferences are set aside" in preference_note(facts, everything, result.given_up)


def test_only_the_preferences_in_the_way_are_given_up():
    facts = transformer(2)
    free = free_values(facts, {}).free
    small = min(free, key=lambda i: facts.values[i].bytes)
    preferred = {i: prefer("save", "keep all") for i in free if i != small}
    preferred[small] = prefer("save", "keep the small one")
    smallest = pareto(facts, {small: "save"}, depth=0)[0].peak_bytes
    _, result = budget_wishes(facts, smallest, {}, preferred)
    assert set(result.given_up) == set(free) - {small}


def test_what_is_fixed_is_never_asked_for_and_keep_can_be_given():
    facts = transformer(2)
    forward = free_values(facts, {})
    fixed = {forward.free[0]: "save"}
    wishes, _ = budget_wishes(facts, 10**12, fixed)
    assert forward.free[0] not in wishes and set(forward.kept) <= set(wishes)
    wishes, _ = budget_wishes(facts, 10**12, {}, keep={})
    assert set(wishes) == {*forward.free, *forward.kept}
    assert not any("output" in w.reason for w in wishes.values())


def test_time_grows_with_the_graph_and_no_faster():
    def seconds(layers):
        facts = transformer(layers)
        low, high = facts.parameter_bytes, sum(v.bytes for v in facts.values)
        start = process_time()
        try:
            budget_wishes(facts, (low + high) // 4, {})
        except InfeasibleError:
            pytest.fail("a quarter of all bytes is feasible")
        return process_time() - start

    assert seconds(120) < 3 * 1.7 * max(seconds(40), 0.4)
