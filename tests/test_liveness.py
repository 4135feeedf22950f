"""Predicted bytes against a recount that runs the steps and looks at every value at every step."""

import pytest
import torch
from hypothesis import given

from autop_ac import measure_memory
from autop_ac.capture.trace import capture, request
from autop_ac.graph.facts import Facts, Value
from autop_ac.graph.liveness import backward_order, forward_order, profile
from autop_ac.recompute.verify import closure
from tests.strategies import facts_with_actions
from tests.test_partition import compiled, facts_of, make_plan


def reads(value):
    """What is alive while a value is computed."""
    return (*value.inputs, *value.holds)


def recount(facts, given_values, steps, results):
    """Quadratic: after each step, drop what no later step and no result reads; sum storages."""
    always = [v for v in facts.values if v.side == "input" and v.role != "tangent"]
    read_somewhere = {i for s in steps for i in reads(facts.values[s])} | set(results)
    held = set(given_values)
    bytes_at = []
    for at, step in enumerate(steps):
        held.add(step)
        storages = {s for i in held for s in facts.values[i].storages}
        storages |= {s for v in always for s in v.storages}
        bytes_at.append(sum(facts.storage_bytes[s] for s in storages))
        later = {i for s in steps[at + 1 :] for i in reads(facts.values[s])} | set(results)
        held = {i for i in held if i in later or i not in read_somewhere}
    return tuple(bytes_at)


@given(facts_with_actions())
def test_p11_liveness_equals_a_naive_recount(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    got = profile(facts, saved)
    tangents = [v.index for v in facts.values if v.role == "tangent"]
    ahead = recount(facts, (), forward_order(facts, saved), (*facts.forward_outputs, *saved))
    back = recount(facts, (*saved, *tangents), backward_order(facts, saved), facts.backward_outputs)
    assert got.forward == ahead
    assert got.backward == back
    assert got.peak_bytes == max(*ahead, *back)


@given(facts_with_actions())
def test_holders_sum_to_the_peak(drawn):
    facts, actions = drawn
    got = profile(facts, closure(facts, actions)[0])
    assert sum(got.holders.values()) == got.peak_bytes
    assert all(b >= 0 for b in got.holders.values())


@given(facts_with_actions())
def test_orders_compute_each_value_once_after_what_it_reads(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    inputs = {v.index for v in facts.values if v.side == "input"}
    for order, have in (
        (forward_order(facts, saved), set(inputs)),
        (backward_order(facts, saved), inputs | set(saved)),
    ):
        assert len(set(order)) == len(order)
        for i in order:
            assert set(facts.values[i].inputs) <= have, i
            have.add(i)


def chain(n, nbytes=10):
    """x -> f1 -> ... -> fn and back, each backward step reading the forward value before it."""
    values = [
        Value(0, "x", "placeholder", "input", role="input", bytes=1, storages=(0,)),
        Value(1, "t", "placeholder", "input", role="tangent", bytes=1, storages=(1,)),
    ]
    sizes = [1, 1]

    def add(name, side, inputs):
        sizes.append(nbytes)
        index = len(values)
        made = Value(index, name, "aten.f", side, inputs, bytes=nbytes, storages=(len(sizes) - 1,))
        values.append(made)
        return index

    last = 0
    forward = [last := add(f"f{i}", "forward", (last,)) for i in range(n)]
    gradient = 1
    for i in reversed(range(n)):
        gradient = add(f"g{i}", "backward", (gradient, forward[i - 1] if i else 0))
    return Facts(tuple(values), (forward[-1],), (gradient,), tuple(sizes)), forward


def test_recomputed_values_appear_just_before_they_are_read():
    facts, forward = chain(4)
    order = [facts.values[i].name for i in backward_order(facts, [forward[1]])]
    assert order == ["f2", "g3", "g2", "f0", "g1", "g0"]


def test_a_stage_in_the_middle_lowers_the_peak_and_recomputing_all_does_not():
    facts, forward = chain(16)
    everything = profile(facts, forward[:-1])
    nothing = profile(facts, [])
    middle = profile(facts, [forward[3], forward[7], forward[11]])
    assert everything.kept_bytes == 150 and nothing.kept_bytes == 0
    assert middle.peak_bytes < everything.peak_bytes / 2
    assert nothing.peak_bytes > 0.9 * everything.peak_bytes
    assert middle.holders["saved"] <= 30


def test_parameter_bytes_of_facts_without_placeholders_count():
    facts, forward = chain(2)
    heavier = Facts(
        facts.values, facts.forward_outputs, facts.backward_outputs, facts.storage_bytes, 1000
    )
    plain, heavy = profile(facts, forward[:1]), profile(heavier, forward[:1])
    assert heavy.peak_bytes == plain.peak_bytes + 1000
    assert heavy.holders["parameters"] == 1000


class Chain(torch.nn.Module):
    """Linear and tanh, which need no scratch memory, and a result of four bytes."""

    def __init__(self):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for linear in self.linears:
            x = linear(x).tanh()
        return x.sum()


@pytest.mark.parametrize("kept", ["", "tanh", "addmm", "aten"])
def test_predicted_peak_equals_the_bytes_measured_while_the_graphs_run(kept):
    model = Chain()
    joint = capture(request(model, lambda: torch.randn(256, 64)))
    facts = facts_of(joint)
    choose = lambda v: "save" if kept and kept in v.op else "recompute"  # noqa: E731
    predicted = profile(facts, make_plan(facts, choose).saved)
    fn, _ = compiled(joint, choose)
    parameters = [
        model.get_parameter(n).detach().clone().requires_grad_() for n in joint.calling.parameters
    ]
    x, seed = torch.randn(256, 64), torch.ones(())
    with measure_memory() as memory:
        out = fn(*parameters, x)
        out = out[0] if isinstance(out, (tuple, list)) else out
        torch.autograd.grad(out, parameters, seed)
    before = predicted.holders["parameters"] + predicted.holders["inputs"]
    # the result and the seed are outside on one side and inside on the other: four bytes each
    assert abs(predicted.peak_bytes - before - memory.peak_bytes) <= 8
