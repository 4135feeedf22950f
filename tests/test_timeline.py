"""Holders at every step sum to the predicted bytes; times against steps counted by hand."""

from hypothesis import given

from autop_ac.graph.facts import Facts, Value
from autop_ac.graph.liveness import profile
from autop_ac.graph.timeline import HOLDERS, StepTime, phase_of, step_time, timeline
from autop_ac.recompute.collectives import parameter_chains
from autop_ac.recompute.verify import closure
from tests.strategies import facts_with_actions

_SAME = {  # holders as the profile calls them, of those that gathers do not take from
    "parameters": "parameters",
    "inputs": "inputs",
    "outputs": "outputs",
    "gradients": "gradients",
}


@given(facts_with_actions())
def test_holders_sum_to_the_predicted_bytes_at_every_step(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    predicted = profile(facts, saved)
    made = timeline(facts, saved, parameter_chains(facts))
    assert made.live == (*predicted.forward, *predicted.backward)
    assert made.forward_steps == len(predicted.forward)
    at = made.peak_step
    assert made.live[at] == predicted.peak_bytes
    assert made.steps[at] == predicted.peak_index
    alive = sum(span.bytes for span in made.at(at))
    assert alive + sum(made.always.values()) == predicted.peak_bytes


@given(facts_with_actions())
def test_holders_at_the_peak_are_those_of_the_profile(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    predicted = profile(facts, saved)
    made = timeline(facts, saved)
    at = made.peak_step
    holders = {name: bytes_at[at] for name, bytes_at in made.by_holder().items()}
    assert set(holders) <= set(HOLDERS)
    assert holders.get("saved activations", 0) == predicted.holders["saved"]
    assert holders.get("recomputed", 0) == predicted.holders["recomputed"]
    for name, profiles in _SAME.items():
        assert holders.get(name, 0) == predicted.holders[profiles], name


@given(facts_with_actions())
def test_time_is_no_more_than_all_in_a_row_and_no_less_than_either_queue(drawn):
    facts, actions = drawn
    saved, _ = closure(facts, actions)
    made = step_time(facts, saved)
    alone = made.compute_s + made.recompute_operators_s
    total = alone + made.communication_s
    slack = 1e-9 * total  # sums in another order
    assert max(alone, made.communication_s) - slack <= made.step_s <= total + slack
    assert -slack <= made.exposed_s <= made.communication_s + slack


def values(*made):
    """``(op, side, inputs, time_s)`` each; names of collectives are their operators."""
    facts = []
    for i, (op, side, inputs, time_s) in enumerate(made):
        moves = op in ("all_reduce", "all_gather_into_tensor")
        follows = inputs[0] if op == "wait_tensor" else None
        storages = facts[follows].storages if follows is not None else (i,)
        facts.append(
            Value(
                i, f"v{i}", op, side, inputs, bytes=0 if follows is not None else 8, time_s=time_s,
                storages=storages, collective=op if moves else "", follows=follows,
                role="input" if side == "input" else "",
            )
        )  # fmt: skip
    return tuple(facts)


def test_a_collective_is_exposed_where_its_reader_is_ready_first():
    made = values(
        ("placeholder", "input", (), 0.0),
        ("mm", "forward", (0,), 4.0),
        ("all_reduce", "forward", (1,), 5.0),  # from 4 to 9
        ("relu", "forward", (1,), 2.0),  # beside it, from 4 to 6
        ("all_reduce", "forward", (3,), 1.0),  # the network is busy until 9: from 9 to 10
        ("wait_tensor", "forward", (2,), 0.0),  # waits from 6 to 9
        ("add", "forward", (3, 5), 3.0),  # from 9 to 12
        ("wait_tensor", "forward", (4,), 0.0),  # has been there since 10
        ("add", "forward", (6, 7), 1.0),
        ("mul", "backward", (3,), 2.0),
    )
    facts = Facts(made, (8,), (9,), (8,) * len(made))
    assert step_time(facts, (3,)) == StepTime(12.0, 0.0, 6.0, 3.0)
    # relu and what it needs run again in backward
    assert step_time(facts, ()) == StepTime(12.0, 6.0, 6.0, 3.0)
    assert step_time(facts, ()).step_s == 21.0


def test_phases_and_the_optimizer():
    made = values(
        ("placeholder", "input", (), 0.0),
        ("mm", "forward", (0,), 1.0),
        ("relu", "forward", (1,), 1.0),
        ("mul", "backward", (1,), 1.0),
    )
    facts = Facts(made, (2,), (3,), (8,) * len(made))
    line = timeline(facts, (), optimizer_bytes=100)
    assert [phase_of(facts, line, i) for i in range(len(line.steps))] == [
        "forward", "forward", "recompute", "backward",
    ]  # fmt: skip
    assert line.by_holder()["optimizer state"] == (100,) * 4
    assert line.live[0] == 8 + 100 + 8
