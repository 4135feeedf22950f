"""Facts collected from traced graphs, and the closure over random facts."""

import pytest
import torch
from hypothesis import given, settings
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autop_ac.capture.joint import Port
from autop_ac.capture.trace import capture, request
from autop_ac.graph.collect import collect_facts
from autop_ac.graph.facts import Facts, Value
from autop_ac.graph.liveness import backward_order, live_backward
from autop_ac.recompute.default import _forward_names, default_saved
from autop_ac.recompute.hints import resolve_hints
from autop_ac.recompute.verify import closure, effective_action, must_be_saved
from tests.strategies import RandomModule, facts_with_actions, random_modules


def collected(layers):
    joint = capture(request(RandomModule(layers), lambda: torch.randn(4, 4, requires_grad=True)))
    return collect_facts(joint.module, joint.placeholders, joint.results, joint.num_forward_outputs)


def written(gm):
    """All that a graph says, with the identity of what it holds."""
    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), {k: id(v) for k, v in n.meta.items()})
        for n in gm.graph.nodes
    ]


@settings(max_examples=5)
@given(random_modules())
def test_p12_analysis_leaves_the_graph_as_it_was(module):
    joint = capture(request(module, lambda: torch.randn(4, 4, requires_grad=True)))
    gm, names = joint.module, frozenset()
    before, code = written(gm), gm.code
    facts = collect_facts(gm, joint.placeholders, joint.results, joint.num_forward_outputs)
    resolve_hints(gm, joint.placeholders)
    default_saved(gm, names, joint.num_forward_outputs)
    closure(facts, {})
    assert written(gm) == before
    assert gm.code == code


def test_what_min_cut_keeps_of_a_deep_backward_is_found_in_one_pass():
    graph = fx.Graph()
    x = graph.placeholder("x")
    kept = graph.call_function(torch.ops.aten.sin.default, (x,))
    before, last = kept, kept
    for _ in range(200):  # each reads the two before: a walk along all ways would never end
        before, last = last, graph.call_function(torch.ops.aten.add.Tensor, (last, before))
        last.meta["partitioner_tag"] = "is_backward"
    graph.output([kept, last])
    gm = fx.GraphModule({}, graph)
    assert _forward_names(gm, {last.name}, 1) == {kept.name}


@given(facts_with_actions())
def test_p05_closure_gives_backward_all_it_needs_and_keeps_nothing_in_vain(drawn):
    facts, actions = drawn
    saved, saved_inputs = closure(facts, actions)
    order = backward_order(facts, saved)
    again = [i for i in order if facts.values[i].side == "forward"]
    read = {j for i in order for j in facts.values[i].inputs} | set(facts.backward_outputs)
    for i in again:  # what runs again may run again; a view and its like cost nothing
        assert not must_be_saved(facts, i)
        value = facts.values[i]
        costs_nothing = value.follows is not None or value.bytes == 0
        assert costs_nothing or effective_action(facts, actions, i) == "recompute"
    assert set(saved) <= read
    assert set(saved).isdisjoint(order)
    assert set(saved_inputs) == {
        i for i in read if facts.values[i].side == "input" and facts.values[i].role != "tangent"
    }
    assert all(facts.values[i].side == "forward" for i in saved)


@given(facts_with_actions())
def test_p05_no_storage_is_kept_twice_nor_before_its_collective_has_ended(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    storages = [s for i in saved for s in facts.values[i].storages]
    assert len(storages) == len(set(storages))
    assert not {s for v in facts.values if v.side == "input" for s in v.storages} & set(storages)
    producers = {v.follows for v in facts.values if v.op == "getitem"}
    assert producers.isdisjoint(saved)


@given(facts_with_actions())
def test_saving_everything_recomputes_only_what_is_free(drawn):
    facts, _ = drawn
    saved, _ = closure(facts, {v.index: "save" for v in facts.forward})
    again = [i for i in backward_order(facts, saved) if facts.values[i].side == "forward"]
    assert all(facts.values[i].bytes == 0 for i in again)


def test_sides_roles_and_results():
    facts = collected(("plain",))
    assert {v.role for v in facts.values if v.side == "input"} >= {"parameter", "input", "tangent"}
    assert all(facts.values[i].side == "forward" for i in facts.forward_outputs)
    assert len(facts.backward_outputs) == 3  # weight, bias, x
    assert all(v.index == i for i, v in enumerate(facts.values))
    assert facts.values[-1].side == "output"
    assert facts.parameter_bytes == 4 * (16 + 4)
    weight = next(v for v in facts.values if v.parameter.endswith("weight"))
    assert weight.role == "parameter" and weight.shape == (4, 4) and weight.dtype == "float32"
    assert next(v for v in facts.values if "tanh" in v.op and v.side == "forward").bytes == 64
    assert live_backward(facts)


def test_views_share_the_storage_of_their_base_and_follow_it():
    facts = collected(("split", "transpose"))
    views = [v for v in facts.values if v.follows is not None and v.op != "getitem"]
    assert views
    for view in views:
        base = facts.values[view.follows]
        assert view.bytes == 0 and set(view.storages) <= set(base.storages)
    assert sum(v.bytes for v in facts.values) == sum(facts.storage_bytes)


def test_getitem_follows_its_producer_which_holds_the_bytes():
    facts = collected(("norm",))
    norm = next(v for v in facts.values if "native_layer_norm.default" in v.op)
    parts = [v for v in facts.values if v.follows == norm.index]
    assert parts and all(p.op == "getitem" and p.bytes == 0 for p in parts)
    assert norm.bytes == 4 * (16 + 4 + 4)


def test_random_and_mutated_reads():
    facts = collected(("dropout", "buffer"))
    assert any(v.random and v.side == "forward" for v in facts.values)
    first = [v for v in facts.values if v.reads_mutated]
    assert [v.op for v in first] == ["aten.mul.Tensor"]  # and not what reads its result
    assert must_be_saved(facts, first[0].index)


def traced(fn, *args):
    gm = make_fx(fn, tracing_mode="fake")(*args)
    holders = gm.graph.find_nodes(op="placeholder")
    ports = {n.name: Port("input", n.name, i) for i, n in enumerate(holders)}
    results = tuple(Port("output", "", i) for i in range(len(gm.graph.output_node().args[0])))
    return gm, ports, results


def test_copy_onto_an_input_is_effectful_and_marks_its_readers():
    def step(x):
        y = x.t().sin()
        torch.ops.aten.copy_.default(x, y)
        return [y]

    facts = collect_facts(*traced(step, torch.randn(2, 2)), 1)
    by_op = {v.op: v for v in facts.values}
    assert by_op["aten.copy_.default"].effectful
    assert by_op["aten.sin.default"].reads_mutated and by_op["aten.t.default"].reads_mutated
    assert must_be_saved(facts, by_op["aten.sin.default"].index)
    assert not must_be_saved(facts, by_op["aten.t.default"].index)  # a view: nothing is read


def test_a_backward_tag_holds_unless_forward_needs_the_node_and_spreads_to_readers():
    gm, ports, results = traced(lambda x: [x.sin(), x.cos().exp()], torch.randn(2))
    for node in gm.graph.nodes:
        if node.name in ("sin", "cos"):
            node.meta["partitioner_tag"] = "is_backward"
    facts = collect_facts(gm, ports, results, 1)
    assert {v.name: v.side for v in facts.values if v.op.startswith("aten")} == {
        "sin": "forward",
        "cos": "backward",
        "exp": "backward",
    }


def test_notes_of_the_shard_pass_are_read():
    gm, ports, results = traced(lambda x: [x.sin()], torch.randn(2))
    note = {
        "origin": "sin_7",
        "captured_op": "aten.sin.default",
        "module": "a.b",
        "source": "f.py:3",
    }
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))).meta[
        "custom"
    ] = {"autop_ac": note}
    value = collect_facts(gm, ports, results, 1, lambda n: 2.5).values[1]
    assert (value.origin, value.captured_op) == ("sin_7", "aten.sin.default")
    assert (value.module, value.source, value.time_s) == ("a.b", "f.py:3", 2.5)


def gathered(action):
    """w -> all_gather -> wait -> t -> used by backward."""
    op = "_c10d_functional."
    values = (
        Value(0, "w", "placeholder", "input", role="parameter", bytes=4, storages=(0,)),
        Value(1, "tan", "placeholder", "input", role="tangent", bytes=4, storages=(1,)),
        Value(2, "ag", op + "all_gather_into_tensor.default", "forward", (0,), bytes=8,
              storages=(2,), collective="all_gather_into_tensor"),
        Value(3, "wait", op + "wait_tensor.default", "forward", (2,), storages=(2,), follows=2),
        Value(4, "t", "aten.t.default", "forward", (3,), storages=(2,), follows=3),
        Value(5, "g", "aten.mm.default", "backward", (1, 4), bytes=4, storages=(3,)),
    )  # fmt: skip
    facts = Facts(values, (4,), (5,), (4, 4, 8, 4))
    return closure(facts, dict.fromkeys((2, 3, 4), action))


@pytest.mark.parametrize(("action", "expected"), [("save", ((3,), ())), ("recompute", ((), (0,)))])
def test_of_a_collective_the_waited_result_is_kept(action, expected):
    assert gathered(action) == expected
