"""Plans explain themselves, are compared, saved and read back."""

import json
import logging
import pickle

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autop_ac import (
    AutoParallel,
    ConfigError,
    PlanFileError,
    ShardingPlan,
    UsageError,
    fake_mesh,
    plan_table,
)
from autop_ac.placements import parse_placements, placement_text
from autop_ac.sharding.plan import Choice

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class MLP(torch.nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, hidden), torch.nn.Linear(hidden, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def opened(hidden=64, devices=4):
    ap = AutoParallel(MLP(hidden), lambda: torch.randn(64, 32), fake_mesh((devices,)))
    ap.configure_device("H100").configure_compile("eager")
    return ap


@pytest.fixture(scope="module")
def planned():
    with opened() as ap:
        plan = ap.optimize_placement()
    torch.distributed.destroy_process_group()
    return ap, plan


def test_alternatives_cost_what_a_plan_with_them_costs(planned):
    _, plan = planned
    (reason,) = plan.explain("up.weight").nodes
    assert reason.chosen == plan.parameters["up.weight"]
    found = {a.placements: a for a in reason.alternatives}
    assert set(found) == {(R,), (S0,), (S1,)} - {reason.chosen}
    # what one node alone costs more is at least what it costs more where all others may follow
    for placements, alternative in found.items():
        forced = plan.explain("up.weight", placements)
        assert forced.asked == placements and not forced.why_not
        gap = 2e-3 * plan.objective_s  # of two searches
        assert forced.difference.objective_s <= alternative.more_s + gap
        assert forced.difference.objective_s >= -gap
        assert any(c.name == "up.weight" for c in forced.difference.parameters)
    assert "up.weight" in str(forced) and "ms" in str(forced)


def test_a_module_is_explained_node_by_node_and_an_impossible_placement_says_why(planned):
    _, plan = planned
    reasons = plan.explain("up").nodes
    assert any("addmm" in reason.op for reason in reasons)
    assert any(reason.name in plan.choices for reason in reasons)
    odd = plan.explain("up.bias", (Shard(3),))
    assert odd.difference is None and "its placements are" in odd.why_not and "no plan" in str(odd)
    with pytest.raises(ConfigError, match=r"no node.*did you mean .*up"):
        plan.explain("upp")


def test_the_overview_says_what_sharding_along_an_axis_saves_and_is_logged(caplog):
    with opened(hidden=4096) as ap:
        ap.add_parameter_memory_constraint(0.0, 0.3)
        with caplog.at_level(logging.INFO, logger="autop_ac"):
            overview = ap.optimize_placement(verbose=True).explain()
    (axis,) = overview.axes
    whole = 4 * 4 * (2 * 32 * 4096 + 4096 + 32)  # parameter, gradient, two of AdamW, float32
    assert axis.sharded >= 2 and axis.devices == 4
    assert 0.65 * whole <= axis.state_bytes <= 0.76 * whole
    assert "parameters are sharded along it" in str(overview)
    logged = [record.getMessage() for record in caplog.records]
    assert str(overview) in logged and any(text.startswith("Sharding plan") for text in logged)


def test_the_overview_says_where_constraints_leave_no_plan_with_parameters_whole():
    with opened() as ap:
        ports = ap._joint.placeholders
        name = next(n for n in ports if ports[n].name == "up.weight")
        ap.sharding_optimizer.add_node_constraint(name, (S0,))
        (axis,) = ap.optimize_placement().explain().axes
    assert axis.time_s is None and axis.sharded >= 1
    assert str(axis).endswith("the constraints leave no plan without that")


def test_plans_differ_where_they_were_made_to(planned):
    _, plan = planned
    assert not plan.diff(plan).nodes and "the same placements" in str(plan.diff(plan))
    with opened() as ap:
        ap.sharding_optimizer.add_node_constraint(
            next(
                n for n in ap._joint.placeholders if ap._joint.placeholders[n].name == "up.weight"
            ),
            (S0,) if plan.parameters["up.weight"] != (S0,) else (S1,),
        )
        other = ap.optimize_placement()
    found = plan.diff(other)
    assert [c.name for c in found.parameters].count("up.weight") == 1
    assert found.objective_s == pytest.approx(other.objective_s - plan.objective_s)
    assert found.objective_s == pytest.approx(
        found.compute_s + found.collectives_s - found.hidden_s, abs=1e-12
    )
    assert "up.weight: (" in str(found)


def test_a_saved_plan_is_the_plan_and_can_be_applied(planned, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan and list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
    with pytest.raises(UsageError, match="loaded"):
        loaded.explain("up")
    with opened() as ap:
        ap.apply_placement(loaded)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_of_another_graph_is_refused(planned, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    with opened(hidden=128) as ap:
        with pytest.raises(UsageError, match="another model.*fingerprint"):
            ap.apply_placement(ShardingPlan.load(tmp_path / "plan.json"))


def test_a_file_that_is_not_there_is_told_with_the_nearest_and_may_be_caught_as_such(
    planned, tmp_path
):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    for error in (PlanFileError, FileNotFoundError):
        with pytest.raises(
            error, match=r"plam\.json: there is no such file; did you mean .*plan\.json"
        ):
            ShardingPlan.load(tmp_path / "plam.json")
        with pytest.raises(error, match=r"no such file, and no folder .*no\n.*plan\.save"):
            ShardingPlan.load(tmp_path / "no" / "plan.json")
        with pytest.raises(error, match="there is no folder .*no: make it first"):
            plan.save(tmp_path / "no" / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFileError, match="no complete plan"):
        ShardingPlan.load(tmp_path / "plan.json")


def test_a_plan_is_shown_as_a_table_by_the_public_name(planned, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    table = plan_table(ShardingPlan.load(tmp_path / "plan.json"))
    assert table == plan_table(plan) and "up.weight" in table and "step by the search" in table


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_refused(planned, tmp_path, kept):
    _, plan = planned
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * kept)])
    with pytest.raises(PlanFileError, match=r"plan\.json: no complete plan.*cut off"):
        ShardingPlan.load(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 99}, "version 99, and this library reads 1"),
        ({"format": "other"}, "no plan that ShardingPlan.save has written"),
        ({"mesh_shape": [2, 2]}, "not placed on 2 axes"),
        ({"parameters": {"up.weight": "S0"}}, "'S0' is no placement"),
        ({"choices": None}, "does not hold together"),
    ],
)
def test_another_version_or_content_is_refused(planned, tmp_path, change, text):
    _, plan = planned
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PlanFileError, match=text):
        ShardingPlan.load(path)


def test_placements_are_read_back_from_their_text():
    from torch.distributed.tensor import Partial

    for placements in ((R, S0), (Shard(-1), Partial("avg")), (Partial(),)):
        assert parse_placements(placement_text(placements)) == placements
    with pytest.raises(ValueError, match="no placement"):
        parse_placements("S(0) Q")


def test_a_plan_prints_as_its_parameters_and_not_as_its_thousand_choices():
    plan = ShardingPlan(
        (4, 2), ("dp", "tp"), {"add": Choice("add", (), ())}, {"w": (Shard(0), Replicate()), "a.0.w": (Shard(0), Shard(1)), "a.1.w": (Shard(0), Shard(1))},
        0.0125, 0.01, ("look here",),
    )  # fmt: skip
    assert str(plan).splitlines() == [
        "ShardingPlan on mesh (dp=4, tp=2): step by the search, nothing recomputed, 12.500 ms, gap 1.00%",
        "  w: S(0) R",
        "  a.0-1.w x 2: S(0) S(1)",
        "note: look here",
    ]
    assert "choices" not in repr(plan)
