"""Estimates and answers against sums over the model's own parameters, the plan, and a measurement."""

import dataclasses
import math

import pytest
import torch
from torch.distributed.tensor import Shard

from autop_ac import (
    AutoParallel,
    ConfigError,
    DeviceSpec,
    UsageError,
    checkpoint_name,
    fake_mesh,
    measure_memory,
)
from autop_ac.graph.liveness import backward_order
from autop_ac.recompute.plan import Origin
from autop_ac.report.text import duration, size
from tests.gpt import GPT, GPTConfig, HintedGPT, mean_loss

MESH = (4,)


class NamedGPT(HintedGPT):
    def head(self, x):
        return super().head(checkpoint_name(x, "last"))


def tokens():
    return torch.randint(64, (64, 16))


@pytest.fixture(scope="module")
def planned():
    """A hinted model, under a rule that the hints override, and its report; nothing is compiled."""
    ap = AutoParallel(NamedGPT(GPTConfig(tied=False)), tokens, fake_mesh(MESH, ("dp",)))
    ap.configure_ac(rules=["blocks.*::MATMUL=recompute"]).configure_compile("eager")
    with ap.configure_device("H100"):
        ap.add_parameter_memory_constraint()
        ap.add_input_constraints([(Shard(0),)])
        ap.add_output_constraints([(Shard(0),)])
        ap.optimize_placement()
    return ap, ap.ac_report


@pytest.fixture(scope="module")
def with_state(planned):
    """The same with the state of AdamW in the settings."""
    ap, report = planned
    fake_mesh(MESH, ("dp",))  # that of `planned` is taken down after each test
    rules = ["blocks.*::MATMUL=recompute"]
    counted = ap.configure_ac(rules=rules, optimizer="adamw").preview()
    ap._report = report
    return counted


def local_parameter_bytes(ap, report):
    """From the model and the placements alone: every shard is even here."""
    total = 0
    for name, parameter in ap._model.named_parameters():
        placements = report.basis.sharding.parameters[name]
        parts = math.prod(n for n, p in zip(MESH, placements, strict=True) if p.is_shard())
        assert parameter.numel() % parts == 0
        total += parameter.nbytes // parts
    return total


def test_the_holders_sum_to_the_predicted_peak_and_nothing_was_compiled(planned):
    ap, report = planned
    made = ap.estimate()
    assert made.peak_bytes == report.peak_bytes == sum(h.bytes for h in made.holdings)
    assert made.bytes_of("parameters") == local_parameter_bytes(ap, report)
    assert made.bytes_of("inputs") == 64 * 16 * 8 // 4
    assert made.bytes_of("optimizer state") == 0
    kept = [h for h in made.holdings if h.holder == "saved activations"]
    assert 0 < sum(h.bytes for h in kept) <= report.kept_bytes
    assert {"blocks.0-1.up"} <= {h.module for h in kept if h.layers == 2}
    assert (made.devices, made.device) == (4, "H100")


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("adagrad", 1), ("sgd", 0)])
def test_an_optimizer_counts_its_copies_of_the_parameter_shards(planned, optimizer, copies):
    ap, report = planned
    plain, counted = ap.estimate(), ap.estimate(optimizer)
    state = copies * local_parameter_bytes(ap, report)
    assert counted.bytes_of("optimizer state") == state
    assert counted.peak_bytes == plain.peak_bytes + state
    assert counted.time == plain.time


def test_state_that_the_settings_count_is_counted_once(planned, with_state):
    _, report = planned
    assert with_state.peak_bytes == report.estimate("adamw").peak_bytes
    assert with_state.estimate().holdings == report.estimate("adamw").holdings
    assert with_state.estimate("sgd").peak_bytes == report.peak_bytes


def test_the_seconds_are_those_of_what_runs(planned):
    _, report = planned
    facts, saved = report.basis.facts, report.basis.plan.saved
    again = [facts.values[i] for i in backward_order(facts, saved)]
    again = [v for v in again if v.side == "forward"]
    time = report.estimate().time
    assert time.recompute_s == pytest.approx(sum(v.time_s for v in again))
    gathers = sum(v.time_s for v in again if v.collective)
    assert time.recompute_communication_s == pytest.approx(gathers) and gathers > 0
    assert 0 < time.exposed_s <= time.communication_s
    operators = time.recompute_operators_s
    assert report.estimate().step_s == time.compute_s + operators + time.exposed_s


def test_every_report_tells_the_same_seconds(planned):
    _, report = planned
    made = report.estimate()
    assert (report.step_s, report.recompute_s) == (made.step_s, made.time.recompute_s)
    assert made.step_s != report.basis.sharding.objective_s, "which recomputes nothing"
    told = f"{duration(made.step_s)}", f"{duration(made.time.recompute_s)}"
    assert all(said in str(report) and said in " ".join(str(made).split()) for said in told)
    assert report.explain("").recompute_s == pytest.approx(made.time.recompute_s)
    assert report.estimate("adamw").time == made.time


def test_it_fits_as_long_as_nine_tenths_of_the_device_hold_the_peak(planned):
    _, report = planned
    peak = report.peak_bytes

    def on(memory_bytes):
        spec = DeviceSpec("small", {torch.float32: 1e12}, 1e11, memory_bytes)
        basis = dataclasses.replace(report.basis, device=spec)
        return dataclasses.replace(report, basis=basis).estimate()

    least = -(-peak * 10 // 9)
    assert on(least).fits and on(least).usable_bytes >= peak
    assert not on(least - 2).fits
    assert "DOES NOT FIT" in str(on(least - 2)) and "usable" in str(on(least))
    assert on(least).device_bytes == least


def test_the_text_is_plain_and_says_who_holds_and_how_long(planned):
    text = str(planned[1].estimate("adamw"))
    assert text.isascii() and max(map(len, text.splitlines())) <= 80
    for part in ("on each of 4 devices (H100, 80.00 GiB)", "fits", "optimizer state", "inputs",
                 "blocks.0-1.up", "waiting for collectives", "at the peak runs"):  # fmt: skip
        assert part in text, part
    assert planned[1].estimate()._repr_html_().count("<table>") == 1
    with pytest.raises(ConfigError, match="optimizer='adamv': allowed are adamw"):
        planned[1].estimate("adamv")


def test_notes_of_the_placements_stand_in_the_estimate_too(planned):
    _, report = planned
    sharding = dataclasses.replace(report.basis.sharding, notes=("no input is sharded",))
    basis = dataclasses.replace(report.basis, sharding=sharding)
    made = dataclasses.replace(report, basis=basis).estimate()
    assert made.notes == (*report.basis.plan.notes, "no input is sharded")
    assert "\nnote: no input is sharded" in str(made)
    assert "<p>note: no input is sharded</p>" in made._repr_html_()
    assert made.to_dict()["notes"] == list(made.notes)


def test_that_it_fits_is_said_with_what_is_not_counted(planned, with_state):
    _, report = planned
    lines = str(report.estimate()).splitlines()
    said = " ".join(" ".join(lines[1:3]).split())
    assert 'fits; optimizer state not counted: estimate(optimizer="adamw")' in said
    assert "fits, state of sgd counted" in str(report.estimate("sgd"))
    assert with_state.estimate().optimizer == "adamw"
    assert "not counted" not in str(with_state.estimate())
    assert "without optimizer state" in str(report)
    assert "without optimizer state" not in str(with_state)


@pytest.fixture(scope="module")
def plain():
    """A model without hints and its plan."""
    ap = AutoParallel(GPT(), tokens, fake_mesh((2,))).configure_compile("eager")
    with ap.configure_device("H100"):
        ap.add_parameter_memory_constraint()
        return ap, ap.optimize_placement()


def test_room_on_the_device_is_told_with_what_it_would_save(plain):
    """The numbers said are those of a plan under the settings said."""
    ap, _ = plain
    fake_mesh((2,))
    report = ap.configure_ac().preview()
    said = report.estimate().advice
    assert ap.configure_ac(optimizer="adamw").estimate().advice == said, "its state counted once"
    assert report.estimate("sgd").advice != said
    best = ap.configure_ac(memory_budget="device", optimizer="adamw").preview()
    assert 0 < best.recompute_s < report.recompute_s, "gathers bind"
    assert said == (
        f'memory_budget="device", optimizer="adamw" in configure_ac would recompute '
        f"{duration(best.recompute_s)} a step, not {duration(report.recompute_s)}, at a peak of "
        f"{size(best.peak_bytes)}, that state counted"
    )
    assert "room: " in str(report.estimate()) and best.estimate().advice == ""

    def on(made, memory_bytes):
        spec = DeviceSpec("small", {torch.float32: 1e12}, 1e11, memory_bytes)
        return dataclasses.replace(made, basis=dataclasses.replace(made.basis, device=spec))

    # not all of it fits there, and how little does is not worked out
    middle = (report.peak_bytes + best.peak_bytes) // 2
    tight = on(report, middle * 10 // 9 + 2).estimate()
    assert (
        tight.fits and f"{size(tight.usable_bytes - tight.peak_bytes)} are not used" in tight.advice
    )
    assert on(report, report.peak_bytes).estimate().advice == "", "no room at all"


def test_of_the_whole_model_everything_that_crosses_is_explained(planned):
    _, report = planned
    answer = report.explain("")
    assert answer.about == "module"
    assert [v.name for v in answer.saved] == [v.name for v in report.saved]
    facts = report.basis.facts
    again = {i for i in backward_order(facts, report.basis.plan.saved)}
    by_name = {v.name: v for v in facts.values}
    told = {by_name[v.name].index for v in answer.recomputed}
    assert told == {v.index for v in facts.forward if v.index in again and v.follows is None}
    assert answer.saved_bytes == report.kept_bytes
    assert answer.recompute_s == pytest.approx(report.recompute_s)


def test_a_module_is_answered_with_lines_reasons_and_hints_set_aside(planned):
    _, report = planned
    answer = report.explain("blocks.1.attention")
    assert answer.values and all(v.module.startswith("blocks.1.attention") for v in answer.values)
    saved = answer.saved[0]
    assert (saved.op, saved.origin) == ("aten.addmm.default", "hint")
    assert saved.shape == (64 // 4 * 16, 3 * 32) and saved.dtype == "float32"
    assert saved.bytes == 4 * math.prod(saved.shape)
    assert "gpt.py:" in saved.source
    assert "saves MATMUL" in saved.reason
    assert any("rule asks to recompute" in aside for aside in saved.set_aside)
    text = str(answer)
    assert text.isascii() and "set aside: rule asks to recompute" in " ".join(text.split())
    assert all(v.time_s > 0 for v in answer.recomputed if v.bytes)
    both = str(report.explain("blocks.*.attention"))
    assert "2 x" in both and "blocks.0-1.attention" in both


def test_names_tensors_and_parameters_are_answered(planned):
    _, report = planned
    named = report.explain("last")
    assert (named.about, [v.op for v in named.values]) == ("name", ["aten.add.Tensor"])
    one = report.explain(report.saved[0].name)
    assert (one.about, [v.fate for v in one.values]) == ("value", ["saved"])
    moved = next(v.parameter for v in report.basis.facts.forward if v.parameter)
    weight = report.explain(moved.split(", ")[0])  # one collective may move several
    assert weight.about == "parameter" and "dp: S(" in weight.placements
    assert any("all_gather" in v.op for v in weight.values)
    assert not weight.saved, "the contract"
    kinds = {v.origin for v in weight.values if v.fate == "recomputed"}
    assert kinds <= {"contract", "default"}
    assert "placed dp: S(" in str(weight) and "all_gather" in str(weight)


def test_every_decision_of_a_view_or_an_effect_is_told_as_it_is(planned):
    """What is saved against its decision is told with the reason that holds, not with the decision's."""
    _, report = planned
    for value in report.explain("**").values:
        decision = next(
            d for i, d in report.basis.plan.decisions.items()
            if report.basis.facts.values[i].name == value.name
        )  # fmt: skip
        if value.fate == "saved" and decision.action == "recompute":
            assert value.origin in ("correctness", "default")
        if value.fate == "unread":
            assert value.reason == "backward does not read it"
        if value.origin not in ("default", "correctness"):
            assert Origin[value.origin.upper()] == decision.origin


def test_what_is_unknown_is_refused_with_the_nearest(planned):
    _, report = planned
    with pytest.raises(UsageError, match=r"'blocks.1.atention'.*nearest are blocks.1.attention"):
        report.explain("blocks.1.atention")
    backward = next(v.name for v in report.basis.facts.values if v.side == "backward")
    with pytest.raises(UsageError, match="backward side"):
        report.explain(backward)


def test_a_measured_step_stands_beside_the_prediction():
    model = GPT(GPTConfig(dim=16))
    inputs = (tokens(), tokens())
    ap = AutoParallel(model, lambda: inputs, fake_mesh((1,)), loss_fn=mean_loss)
    parallel = ap.configure_compile("eager").configure_ac(recompute=["aten.gelu"]).parallelize()
    with measure_memory() as memory:
        loss = parallel(*inputs)
        memory.mark("end of forward")
        loss.backward()
    made = ap.ac_report.beside(memory)
    # the loss and its gradient, and what autograd makes of them, are outside of the graphs
    assert abs(made.peak_bytes - made.measured_peak_bytes) <= 16
    assert abs(made.kept_bytes - made.measured_kept_bytes) <= 16
    assert made.ratio == pytest.approx(1, abs=1e-3)
    assert "end of forward" in str(made) and "(cpu)" in str(made)
    figure = ap.ac_report.plot_memory(memory)
    measured = next(line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2)
    assert len(measured.get_xdata()) == len(memory.live)


def test_a_preview_follows_the_settings_and_the_report_on_a_module_stays(plain):
    ap, plan = plain
    fake_mesh((2,))
    off = ap.configure_ac(enable=False).estimate().peak_bytes
    assert ap.ac_report.peak_bytes == off
    staged = ap.configure_ac(stage_size="auto").estimate().peak_bytes
    assert staged < off and ap.ac_report is ap.ac_report
    ap.configure_ac(enable=False).apply_placement(plan)
    assert ap.ac_report.peak_bytes == off
    assert ap.configure_ac(stage_size="auto").ac_report.peak_bytes == off, "the module is as it was"
    assert ap.preview().peak_bytes == staged == ap.ac_report.peak_bytes


def test_reports_are_asked_for_after_a_plan():
    ap = AutoParallel(GPT(), tokens, fake_mesh((2,)))
    with pytest.raises(UsageError, match="optimize_placement first"):
        ap.preview()
    with pytest.raises(UsageError, match="no report yet"):
        ap.estimate()
