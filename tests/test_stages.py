from collections import defaultdict
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autop_ac.graph.facts import Facts, Value
from autop_ac.recompute.hints import root_of
from autop_ac.recompute.plan import Origin, Wish
from autop_ac.recompute.stages import (
    auto_stage_bytes,
    candidates,
    stage_wishes,
    yielding_stages,
)

from .strategies import facts as random_facts


def network(nodes, outputs=(), **fields):
    """Facts of ``(bytes, inputs, changes)`` triples, numbered from 1; 0 is the input."""
    values = [Value(0, "x", "placeholder", "input", role="input", bytes=1, storages=(0,))]
    for i, (size, inputs, changes) in enumerate(nodes, start=1):
        given = {"op": "aten.op.default", **changes}
        values.append(
            Value(index=i, name=f"v{i}", side="forward", inputs=tuple(inputs), bytes=size,
                  storages=(i,), **given)
        )  # fmt: skip
    return Facts(tuple(values), tuple(outputs), (), (1, *(n[0] for n in nodes)), **fields)


def layers(count, sizes=(4, 16, 16, 4), residual=True, named=True):
    """Equal layers: values of `sizes`, the last adds what entered the layer."""
    nodes = []
    for layer in range(count):
        enters = len(nodes)
        for k, size in enumerate(sizes):
            before = [len(nodes)]
            if residual and k == len(sizes) - 1 and enters not in before:
                before.append(enters)
            nodes.append((size, before, {"module": f"layers.{layer}" if named else ""}))
    return network(nodes)


def actions(wishes):
    return {i: w.action for i, w in wishes.items()}


def stages_of(wishes):
    """Recomputed values by stage."""
    found = defaultdict(list)
    for i, w in wishes.items():
        if w.action == "recompute":
            found[w.reason].append(i)
    return found


@st.composite
def staged(draw):
    facts = draw(random_facts())
    roots = [v.index for v in facts.forward if root_of(facts, v.index) == v.index]
    fixed = draw(st.dictionaries(st.sampled_from(roots), st.sampled_from(("save", "recompute"))))
    return facts, fixed, draw(st.integers(1, 200))


@given(staged())
def test_p1_each_free_value_has_one_wish_and_no_other_has(given):
    facts, fixed, size = given
    wishes, _ = stage_wishes(facts, size, fixed)
    free = {v.index for v in facts.forward if root_of(facts, v.index) == v.index} - set(fixed)
    assert set(wishes) == free
    assert all(w.origin is Origin.AUTO and w.reason and not w.prefer for w in wishes.values())


@given(staged())
def test_p8_no_stage_holds_more_than_its_size_unless_one_value_does(given):
    facts, fixed, size = given
    wishes, notes = stage_wishes(facts, size, fixed)
    large = 0
    for members in stages_of(wishes).values():
        held = [facts.values[i].bytes for i in members]
        if sum(held) > size:
            assert sorted(held)[:-1] == [0] * (len(held) - 1)
            large += 1
            name = next(facts.values[i].name for i in members if facts.values[i].bytes)
            assert any(n.startswith(f"{name} of ") and "stage of its own" in n for n in notes)
    assert len(notes) == large


def prefer(action):
    return Wish(action, Origin.HINT, "the user would rather", prefer=True)


@given(staged(), st.data())
def test_p8_p3_preferences_yield_only_where_a_stage_is_too_large_with_them(given, data):
    facts, fixed, size = given
    roots = [v.index for v in facts.forward if root_of(facts, v.index) == v.index]
    free = [i for i in roots if i not in fixed]
    asked = data.draw(
        st.dictionaries(st.sampled_from(free or [0]), st.sampled_from(("save", "recompute")))
    )
    preferred = {i: prefer(action) for i, action in asked.items() if free}
    wishes, given_up, _ = yielding_stages(facts, size, fixed, preferred)
    assert set(given_up) <= {i for i, w in preferred.items() if w.action == "recompute"}
    held = {i: w.action for i, w in preferred.items() if i not in given_up}
    # what is honoured has no wish of the stages, all else that is free has
    assert set(wishes) == set(free) - set(held)
    assert all(wishes[i].action == "save" for i in given_up)
    # with a stage that holds everything nobody is in the way
    whole = sum(v.bytes for v in facts.forward) + 1
    assert yielding_stages(facts, whole, fixed, preferred)[1] == ()
    # the same as binding hints where nothing was given up
    if not given_up:
        assert wishes == stage_wishes(facts, size, {**fixed, **held})[0]


def test_p8_a_crowded_stage_takes_back_what_was_preferred_to_be_recomputed():
    facts = network([(4, [0], {}), (4, [1], {}), (4, [2], {}), (4, [3], {})], outputs=[4])
    preferred = {1: prefer("recompute"), 2: prefer("recompute"), 3: prefer("recompute")}
    assert yielding_stages(facts, 12, {}, preferred)[1] == ()
    wishes, given_up, _ = yielding_stages(facts, 4, {}, preferred)
    assert given_up and all(wishes[i].action == "save" for i in given_up)
    again = sum(facts.values[i].bytes for i in preferred if i not in given_up)
    assert again <= 3 * 4  # no more than a stage of four bytes for each


@given(staged())
def test_what_crosses_into_a_later_stage_is_saved(given):
    facts, fixed, size = given
    wishes, _ = stage_wishes(facts, size, fixed)
    stage = {i: reason for reason, held in stages_of(wishes).items() for i in held}
    for value in facts.forward:
        root = root_of(facts, value.index)
        if root not in stage:
            continue
        for i in value.inputs:
            read = root_of(facts, i)
            if facts.values[i].side == "forward" and read in stage:
                assert stage[read] == stage[root]


@given(staged(), st.integers(2, 10**6))
def test_p9_scaling_all_sizes_scales_the_answer(given, factor):
    facts, fixed, size = given
    scaled = replace(
        facts,
        values=tuple(replace(v, bytes=factor * v.bytes) for v in facts.values),
        storage_bytes=tuple(factor * b for b in facts.storage_bytes),
    )
    wishes, _ = stage_wishes(facts, size, fixed)
    assert stage_wishes(scaled, factor * size, fixed)[0] == wishes
    assert candidates(scaled, fixed) == tuple(factor * c for c in candidates(facts, fixed))

    def peak(of, scale):
        def evaluate(stage_bytes):
            asked, _ = stage_wishes(of, stage_bytes, fixed)
            saved = sum(of.values[i].bytes for i, w in asked.items() if w.action == "save")
            return 2 * saved + max(
                (sum(of.values[i].bytes for i in held) for held in stages_of(asked).values()),
                default=500 * scale,
            )

        return evaluate

    chosen = auto_stage_bytes(facts, peak(facts, 1), fixed)
    again = auto_stage_bytes(scaled, peak(scaled, factor), fixed)
    assert again == (None if chosen is None else factor * chosen)


@pytest.mark.parametrize("size", range(4, 80))
def test_p15_equal_layers_are_cut_alike_within_a_stage_of_one_layer(size):
    """Sizes below two layers: every layer but the last, which nothing follows, decides alike."""
    wishes, _ = stage_wishes(layers(6), size, {})
    of_layer = [tuple(actions(wishes)[4 * k + j] for j in range(1, 5)) for k in range(5)]
    assert len(set(of_layer)) == 1, of_layer


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=7),
    st.integers(2, 6), st.booleans(), st.integers(1, 100),
)  # fmt: skip
def test_p15_equal_layers_larger_than_a_stage(sizes, count, residual, size):
    facts = layers(count, tuple(sizes), residual)
    if sum(sizes) <= size:
        size = sum(sizes) - 1
    got = actions(stage_wishes(facts, size, {})[0])
    n = len(sizes)
    of_layer = [tuple(got[n * k + j] for j in range(1, n + 1)) for k in range(count - 1)]
    assert len(set(of_layer)) == 1


def test_cuts_fall_where_fewest_bytes_are_alive():
    # alive after each value: 8 9 2 9 8; a stage of 4 values fits, the third leaves least
    facts = network([(8, [0], {}), (9, [1], {}), (2, [2], {}), (9, [3], {}), (8, [4], {})])
    wishes, notes = stage_wishes(facts, 28, {})
    assert [i for i, a in actions(wishes).items() if a == "save"] == [3]
    assert notes == ()
    assert wishes[3].reason == "alive across the cut after stage 0"


def test_layers_without_module_paths_are_still_cut_at_the_residual():
    facts = layers(6, named=False)
    wishes, _ = stage_wishes(facts, 90, {})
    assert [i for i, a in actions(wishes).items() if a == "save"] == [8, 16]


def test_a_graph_whose_live_bytes_only_grow_is_not_cut_after_every_node():
    # every second value is read by all that follow, the others by the next one only
    facts = network([(4, [i, *range(2, i, 2)], {}) for i in range(64)])
    wishes, _ = stage_wishes(facts, 64, {})
    assert 4 <= len(stages_of(wishes)) <= 10


def test_no_stages_and_one_stage():
    facts = layers(3)
    assert stage_wishes(facts, None, {}) == ({}, ())
    wishes, _ = stage_wishes(facts, 3 * 40, {})
    assert set(actions(wishes).values()) == {"recompute"}


def test_activation_collectives_routing_and_outputs_are_kept():
    facts = network(
        [
            (4, [0], {"collective": "all_reduce"}),
            (0, [1], {"op": "_c10d_functional.wait_tensor.default", "follows": 1}),
            (4, [2], {"op": "aten.topk.default"}),
            (4, [3], {"collective": "all_gather_into_tensor", "parameter": "w"}),
            (4, [4], {"random": True}),
            (4, [5], {}),
        ],
        outputs=[6],
    )
    wishes, _ = stage_wishes(facts, 100, {})
    assert actions(wishes) == {1: "save", 3: "save", 4: "recompute", 5: "save", 6: "save"}
    assert stage_wishes(facts, 100, {3: "recompute", 1: "recompute"})[0].keys() == {4, 5, 6}


def test_what_a_hint_has_recomputed_later_keeps_its_inputs():
    """1 is read by 2, which is recomputed by a hint wherever it is read, here in the last stage."""
    facts = network([(4, [0], {}), (4, [1], {}), (4, [0], {}), (4, [3], {}), (4, [2, 4], {})])
    wishes, _ = stage_wishes(facts, 8, {2: "recompute"})
    assert wishes[1].action == "save"


def test_auto_takes_the_lowest_peak_and_of_equal_ones_the_larger():
    facts = layers(4)
    tried = []

    def flat(size):
        tried.append(size)
        return 5

    assert auto_stage_bytes(facts, flat) == 4 * 40
    assert tried[:-1] == sorted(set(tried[:-1]), reverse=True) and tried[-1] is None
    assert auto_stage_bytes(facts, lambda s: abs(s - 80) if s else 100) == 80
    assert auto_stage_bytes(facts, lambda s: 100 if s else 99) is None
    assert auto_stage_bytes(network([]), lambda s: 1) is None


def test_layer_multiples_and_halves_are_candidates_and_few():
    facts = layers(32)
    found = candidates(facts)
    assert {40, 80, 160, 32 * 40, 16 * 40} <= set(found)
    assert len(found) < 24
    # a value that a hint decided is in no stage
    assert max(candidates(facts, {1: "save"})) == 32 * 40 - 4


@given(random_facts(max_forward=6))
def test_p10_auto_equals_the_best_of_all_sizes_on_small_graphs(facts):
    def evaluate(size):
        wishes, _ = stage_wishes(facts, size, {})
        saved = sum(facts.values[i].bytes for i, w in wishes.items() if w.action == "save")
        most = [sum(facts.values[i].bytes for i in held) for held in stages_of(wishes).values()]
        return 10**9 if size is None else saved + max(most, default=0)

    whole = sum(v.bytes for v in facts.forward)
    chosen = auto_stage_bytes(facts, evaluate)
    if chosen is None:
        return
    assert evaluate(chosen) == min(evaluate(s) for s in range(1, whole + 1))


def test_time_grows_with_the_graph_and_no_faster():
    def seconds(count):
        facts, taken = layers(count, sizes=(4, 16, 16, 4) * 5), []
        for _ in range(4):
            start = process_time()
            stage_wishes(facts, 20 * 200, {})
            taken.append(process_time() - start)
        return min(taken)

    assert seconds(2000) < 30 * seconds(200)
