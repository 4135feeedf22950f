"""Buckets and prefetching: the same numbers to the bit, within the bytes that are set and predicted."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autop_ac.build
from autop_ac import AutoParallel, ConfigError, fake_mesh, launch, measure_memory
from autop_ac.capture.names import block_of_path
from autop_ac.config import CommConfig
from autop_ac.graph.ahead import bytes_ahead, bytes_late, issue_ahead, wait_late
from autop_ac.graph.facts import Facts
from autop_ac.graph.liveness import backward_order, forward_order, profile
from tests import strategies
from tests.gpt import GPT, GPTConfig, mean_loss

CONFIG = GPTConfig(vocab_size=64, dim=32, heads=4, layers=3, context=16, tied=False)
ALONE = {"all_gather_bucket": None, "reduce_scatter_bucket": None, "prefetch": False}
AHEAD = {"all_gather_bucket": "64 KiB", "reduce_scatter_bucket": "64 KiB", "prefetch": True}
SETTINGS = {
    "default": {},
    "small": {"all_gather_bucket": "2 KiB", "reduce_scatter_bucket": "2 KiB"},
    "ahead": AHEAD,
    "far ahead": {**AHEAD, "all_gather_bucket": "1 MiB"},
}
MEASURED = ("alone", "default", "ahead", "far ahead")


def inputs(config=CONFIG):
    return tuple(torch.randint(64, (2, 8, config.context)))


def parallelized(mesh, comm, backend="eager", ac=None, config=CONFIG):
    """FSDP's placements: the whole batch sharded, each weight sharded and gathered where it is used."""
    torch.manual_seed(0)
    batch = (Shard(0), *[Replicate()] * (mesh.ndim - 1))
    ap = AutoParallel(GPT(config), partial(inputs, config), mesh, loss_fn=mean_loss)
    ap.configure_compile(backend).configure_ac(**(ac or {})).configure_comm(**comm)
    with ap:
        ap.add_input_constraints([batch, batch])
        ap.add_parameter_memory_constraint()
        _keep_weights_whole(ap)
        return ap, ap.apply_placement(ap.optimize_placement())


def _keep_weights_whole(ap):
    """Every product reads a whole weight, so that each is gathered."""
    joint, mesh = ap._joint, ap._mesh
    for node in joint.module.graph.nodes:
        port = joint.placeholders.get(node.name)
        if port is not None and port.kind == "parameter":
            for user in node.users:
                if user.op == "call_function" and len(user.all_input_nodes) == 1:
                    ap.sharding_optimizer.add_node_constraint(user, (Replicate(),) * mesh.ndim)


def numbers(shape, backend, names):
    """By setting: loss and gradients of one step on this rank, and how many collectives ran."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    torch.manual_seed(1)
    own = [part.chunk(shape[0])[mesh.get_coordinate()[0]] for part in inputs()]
    found = {}
    for name in ("alone", *names):
        ap, module = parallelized(mesh, SETTINGS.get(name, ALONE), backend)
        loss = module(*own)
        loss.backward()
        gradients = [p.grad.to_local() for p in module.parameters()]
        found[name] = (loss.detach(), gradients, len(collectives(ap)))
    return found


def collectives(ap):
    facts, saved = ap.ac_report.basis.facts, ap.ac_report.basis.plan.saved
    order = (*forward_order(facts, saved), *backward_order(facts, saved))
    return [facts.values[i] for i in order if facts.values[i].collective]


@pytest.mark.parametrize(
    ("shape", "backend", "names"),
    [
        ((2,), "eager", ("default", "small", "ahead")),
        ((2, 2), "eager", ("default", "ahead")),
        ((2,), "inductor", ("ahead",)),
    ],
    ids=str,
)
def test_buckets_and_prefetching_change_no_bit(shape, backend, names):
    for found in launch(numbers, math.prod(shape), shape, backend, names):
        loss, gradients, count = found.pop("alone")
        for name, (got, others, fewer) in found.items():
            assert torch.equal(got, loss), name
            assert all(torch.equal(a, b) for a, b in zip(others, gradients)), name
            assert fewer < count, name
        if "small" in found:
            assert found["default"][2] < found["small"][2]


@pytest.fixture(scope="module")
def settled():
    """By setting, the plan on a mesh whose collectives only allocate, and the measured peak."""
    found = {}
    config = GPTConfig(vocab_size=256, dim=64, heads=4, layers=4, context=32, tied=False)
    for name in MEASURED:
        comm = SETTINGS.get(name, ALONE)
        mesh = fake_mesh((2,), ("dp",))
        ap, module = parallelized(mesh, comm, config=config)
        x, y = torch.randint(64, (2, 4, config.context))
        with measure_memory() as measured:
            module(x, y).backward()
        held = sum(p.to_local().numel() * p.element_size() for p in module.parameters())
        found[name] = (ap, held + measured.peak_bytes)
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("name", MEASURED)
def test_what_buckets_hold_is_in_the_predicted_peak(settled, name):
    ap, measured = settled[name]
    assert ap.ac_report.peak_bytes == pytest.approx(measured, rel=0.05)


def test_more_gathered_at_once_or_ahead_is_a_higher_peak_within_the_bound(settled):
    peak = {name: ap.ac_report.peak_bytes for name, (ap, _) in settled.items()}
    assert peak["alone"] < peak["far ahead"] <= peak["alone"] + 3 * 2**20
    assert peak["ahead"] < peak["far ahead"]


@pytest.mark.parametrize("name", ["default", "ahead"])
def test_a_bucket_is_of_one_block_within_its_bytes_and_gathered_again_in_backward(settled, name):
    ap, _ = settled[name]
    facts, plan = ap.ac_report.basis.facts, ap.ac_report.basis.plan
    limit = CommConfig(**SETTINGS[name]).all_gather_bytes
    together = [v for v in facts.values if v.collective.endswith("coalesced")]
    assert {v.collective for v in together} == {
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    }
    for value in together:
        names = value.parameter.split(", ")
        assert len({block_of_path(n) or n.rpartition(".")[0] for n in names}) == 1
        if value.side == "forward":
            assert value.bytes <= limit
    gathers = {v.index for v in together if v.side == "forward"}
    assert gathers & set(backward_order(facts, plan.saved))
    kept = {s for i in plan.saved for s in facts.values[i].storages}
    assert all(kept.isdisjoint(facts.values[i].storages) for i in gathers)


def test_a_budget_is_held_with_what_is_gathered_ahead():
    def predicted(comm, **ac):
        ap, _ = parallelized(fake_mesh((2,), ("dp",)), comm, ac=ac)
        return ap.ac_report.peak_bytes

    comm = {**AHEAD, "all_gather_bucket": "32 KiB"}
    budget = int(0.9 * predicted(comm, enable=False))
    assert predicted(comm, memory_budget=budget) <= budget


def starts_and_waits(ap):
    """Of forward's gathers of parameters, what runs in order: a start or a wait."""
    facts = ap.ac_report.basis.facts
    events, started = [], set()
    for i in forward_order(facts, ap.ac_report.basis.plan.saved):
        value = facts.values[i]
        if value.collective.startswith("all_gather") and value.parameter:
            events.append("start")
            started.add(i)
        elif "wait_tensor" in value.op:
            source = value.inputs[0]
            if facts.values[source].op == "getitem":
                source = facts.values[source].inputs[0]
            events += ["wait"] * (source in started)
    return events


def test_a_gather_is_started_before_the_one_in_front_of_it_is_waited_for(settled):
    ahead = starts_and_waits(settled["ahead"][0])
    plain = starts_and_waits(settled["alone"][0])
    assert plain == ["start", "wait"] * (len(plain) // 2)
    assert ahead[:2] == ["start", "start"]
    # at the end too: all have been started when the last ones are waited for
    assert ahead[-2:] == ["wait", "wait"]


def test_inductor_keeps_the_order(monkeypatch):
    orders = []
    real = autop_ac.lowering.compile.private.compile_fx_inner

    def spied(gm, inputs, **options):
        compiled = real(gm, inputs, **options)
        source = Path(compiled.current_callable.__code__.co_filename).read_text()
        lines = [line for line in source.splitlines() if "_c10d_functional" in line]
        orders.append(["wait" if "wait_tensor" in line else "start" for line in lines])
        return compiled

    monkeypatch.setattr(autop_ac.lowering.compile.private, "compile_fx_inner", spied)
    parallelized(fake_mesh((2,), ("dp",)), {**AHEAD, "all_gather_bucket": "1 MiB"}, "inductor")
    assert orders[0][:2] == ["start", "start"]


@st.composite
def facts_with_parameters(draw):
    """Facts whose gathers and reduce-scatters are of parameters, and bytes that may be ahead."""
    drawn = draw(strategies.facts(max_forward=20))
    values = tuple(
        replace(v, parameter="weight")
        if (v.collective.startswith("all_gather") and v.side == "forward")
        or (v.collective.startswith(("reduce_scatter", "all_reduce")) and v.side == "backward")
        else v
        for v in drawn.values
    )
    return replace(drawn, values=values), draw(st.integers(1, 200))


@given(facts_with_parameters(), st.randoms())
def test_orders_stay_valid_and_bytes_ahead_within_the_bound(drawn, random):
    facts, limit = drawn
    forward = [v.index for v in facts.forward]
    saved = [i for i in forward if facts.values[i].is_tensor and random.random() < 0.3]
    for plain in (forward_order(facts, saved), backward_order(facts, saved)):
        moved = issue_ahead(facts, plain, limit)
        for order in (moved, wait_late(facts, moved)):
            assert sorted(order) == sorted(plain)
            place = {i: at for at, i in enumerate(order)}
            for i in order:
                assert all(place.get(source, -1) < place[i] for source in facts.values[i].inputs)
    here = replace(facts, prefetch_bytes=limit)
    plain, moved = profile(facts, saved), profile(here, saved)
    first, ahead = max(plain.forward, default=0), bytes_ahead(here)
    assert max(moved.forward, default=0) <= first + ahead
    later = max(plain.backward, default=0) + ahead + bytes_late(here)
    assert max(moved.backward, default=0) <= later


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"all_gather_bucket": 0}, "all_gather_bucket=0 is not a size"),
        ({"reduce_scatter_bucket": "12 Mib/s"}, "reduce_scatter_bucket='12 Mib/s' is not a size"),
        ({"prefetch": "yes"}, "prefetch='yes': allowed are True and False"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_made(settings, message):
    ap = AutoParallel(torch.nn.Linear(2, 2), lambda: torch.ones(2, 2), fake_mesh(1))
    with pytest.raises(ConfigError, match=message):
        ap.configure_comm(**settings)


def test_what_is_larger_than_half_a_bucket_stays_alone(settled):
    facts = settled["alone"][0].ac_report.basis.facts
    assert not [v for v in facts.values if v.collective.endswith("coalesced")]


@pytest.mark.parametrize("name", ["default", "far ahead"])
def test_every_tensor_of_a_bucket_is_waited_for_in_forward_and_in_backward(settled, name):
    """PyTorch holds on to what is never waited for, step after step."""
    facts = settled[name][0].ac_report.basis.facts
    saved = settled[name][0].ac_report.basis.plan.saved
    for order in (forward_order(facts, saved), backward_order(facts, saved)):
        parts = {i: facts.values[i].inputs[0] for i in order if facts.values[i].op == "getitem"}
        waits = [facts.values[i].inputs[0] for i in order if "wait_tensor" in facts.values[i].op]
        for i in order:
            value = facts.values[i]
            if value.collective.endswith("coalesced"):
                waited = [part for part in waits if parts.get(part) == i]
                assert len(waited) == len(set(waited)) == len(value.storages)


@pytest.mark.parametrize(("limit", "most"), [(0, 2), (5, 2), (20, 3), (39, 4), (1000, 6)])
def test_no_more_bytes_are_on_their_way_than_the_bound_or_one_gather(limit, most):
    build = strategies._Builder()
    weights = [build.add("placeholder", "input", nbytes=5, role="parameter") for _ in range(6)]
    x = build.add("placeholder", "input", nbytes=5, role="input")
    for weight in weights:
        gather = build.add(
            "_c10d_functional.all_gather_into_tensor.default", "forward", (weight,), 10,
            collective="all_gather_into_tensor", parameter="weight",
        )  # fmt: skip
        wait = build.alias("_c10d_functional.wait_tensor.default", "forward", gather)
        x = build.add("aten.mm.default", "forward", (x, wait), 5)
    facts = Facts(tuple(build.values), (x,), (), tuple(build.storage_bytes))
    on_their_way, highest = set(), 0
    for i in forward_order(replace(facts, prefetch_bytes=limit), ()):
        if facts.values[i].collective:
            on_their_way.add(i)
        elif "wait_tensor" in facts.values[i].op:
            highest = max(highest, len(on_their_way))
            on_their_way.discard(facts.values[i].inputs[0])
    # the one that is waited for now was issued ahead too, until it is in use
    assert highest == most


def held_by_collectives():
    """By kind, half MiB alive after the start of a collective whose input of two nobody else holds."""
    group, ops = torch.distributed.group.WORLD.group_name, torch.ops._c10d_functional
    kinds = {
        "scatter": lambda x: ops.reduce_scatter_tensor(x, "sum", 2, group),
        "scatters": lambda x: ops.reduce_scatter_tensor_coalesced([x], "sum", 2, group)[0],
        "gather": lambda x: ops.all_gather_into_tensor(x, 2, group),
        "gathers": lambda x: ops.all_gather_into_tensor_coalesced([x], 2, group)[0],
    }
    found = {}
    for kind, start in kinds.items():
        with measure_memory() as measured:
            given = torch.ones(2**18)
            made = start(given)
            del given
            torch.distributed.barrier()  # both are done: no scratch memory of gloo is left
            measured.mark("started")
            ops.wait_tensor(made)
        found[kind] = measured.marks["started"] // 2**19
    return found


def test_what_a_collective_reads_is_alive_until_its_wait_and_counted_so():
    both = {"scatter": 2 + 1, "scatters": 2 + 1, "gather": 2 + 4, "gathers": 2 + 4}
    assert all(found == both for found in launch(held_by_collectives, 2))
    build = strategies._Builder()
    weights = [build.add("placeholder", "input", nbytes=1, role="parameter") for _ in range(3)]
    at = build.add("placeholder", "input", nbytes=1, role="tangent")
    gradients = []
    for weight in weights:
        at = build.add("aten.mm.default", "backward", (at, weight), 10)
        scatter = build.add(
            "_c10d_functional.reduce_scatter_tensor.default", "backward", (at,), 4,
            collective="reduce_scatter_tensor", parameter="weight",
        )  # fmt: skip
        wait = build.alias("_c10d_functional.wait_tensor.default", "backward", scatter)
        build.values[wait] = replace(build.values[wait], holds=(at,))
        gradients.append(wait)
    facts = Facts(tuple(build.values), (), tuple(gradients), tuple(build.storage_bytes))
    # at the second scatter: its gradient, and where it is late that of the first one too
    plain = profile(facts, ()).backward
    late = profile(replace(facts, prefetch_bytes=1), ()).backward
    static = 4  # weights and the tangent, which is read no more
    assert max(plain) == static - 1 + 2 * 4 + 20
    assert max(late) == static - 1 + 3 * 4 + 20
    assert plain != late


def uneven_weights(kept, width):
    """Parts of three weights, padded where they are smaller than `kept`, cast, gathered and used."""
    build = strategies._Builder()
    x = build.add("placeholder", "input", nbytes=5, role="input")
    for own, full in zip(width, kept, strict=True):
        part = build.add("placeholder", "input", nbytes=2 * own, role="parameter")
        part = build.add("prims.convert_element_type.default", "forward", (part,), own)
        part = build.alias("aten.t.default", "forward", part)
        if own < full:
            part = build.add("aten.constant_pad_nd.default", "forward", (part,), full)
        gather = build.add(
            "_c10d_functional.all_gather_into_tensor.default", "forward", (part,), 2 * full,
            collective="all_gather_into_tensor", parameter="weight",
        )  # fmt: skip
        wait = build.alias("_c10d_functional.wait_tensor.default", "forward", gather)
        x = build.add("aten.mm.default", "forward", (x, wait), 5)
    return Facts(tuple(build.values), (x,), (), tuple(build.storage_bytes))


def test_ranks_with_smaller_parts_start_gathers_in_the_same_order():
    kept = (4, 20, 6)
    for limit in range(1, 120):
        orders = []
        for width in (kept, (2, 11, 3)):
            facts = replace(uneven_weights(kept, width), prefetch_bytes=limit)
            run = [facts.values[i] for i in forward_order(facts, ())]
            orders.append(
                [(v.bytes, v.op) for v in run if v.collective or v.op == "aten.mm.default"]
            )
        assert orders[0] == orders[1], limit


class TwoWeights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8, bias=False)
        self.two = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def test_a_gather_behind_another_one_shares_no_bucket_with_one_in_front():
    """Also where what the first one gives is cut and put together along another dim."""
    batch = [(Shard(0), Shard(0))]
    ap = AutoParallel(
        torch.nn.Sequential(TwoWeights()), lambda: torch.randn(16, 8), fake_mesh((2, 2))
    )
    with ap.configure_compile("eager").configure_ac(stage_size=None):
        ap.add_input_constraints(batch)
        ap.add_output_constraints(batch)
        ap.sharding_optimizer.add_node_constraint("0.one.weight", (Shard(0), Shard(1)))
        ap.sharding_optimizer.add_node_constraint("0.two.weight", (Shard(0), Replicate()))
        _keep_weights_whole(ap)
        ap.apply_placement(ap.optimize_placement())
    facts = ap.ac_report.basis.facts
    leads: dict[int, set[int]] = {}  # to each value, the gathers of parameters that lead there
    for value in facts.values:
        leads[value.index] = set().union(*(leads[i] for i in value.inputs))
        if value.collective.startswith("all_gather") and value.parameter:
            assert len({bool(leads[i]) for i in value.inputs}) == 1, value.parameter
            leads[value.index].add(value.index)
    assert any(len(found) > 1 for found in leads.values())
