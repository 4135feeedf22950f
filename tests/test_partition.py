"""The cut keeps what the plan says, and the two graphs compute what the joint graph does."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from autop_ac import _torch as private
from autop_ac.capture.trace import capture, request
from autop_ac.errors import PartitionError
from autop_ac.graph.collect import collect_facts
from autop_ac.graph.liveness import backward_order, forward_order
from autop_ac.lowering.partition import partition
from autop_ac.recompute.default import default_saved
from autop_ac.recompute.plan import Decision, Origin, RecomputePlan
from autop_ac.recompute.tags import write_tags
from autop_ac.recompute.verify import check_saved, closure
from tests.strategies import RandomModule, random_modules

SLOW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def make_joint(module, shape=(4, 4)):
    joint = capture(request(module, lambda: torch.randn(*shape, requires_grad=True)))
    return joint, facts_of(joint)


def facts_of(joint):
    return collect_facts(joint.module, joint.placeholders, joint.results, joint.num_forward_outputs)


def make_plan(facts, choose):
    """A plan where ``choose(value)`` gives each action."""
    decisions = {
        v.index: Decision(v.index, choose(v), Origin.RULE, "the test says so")
        for v in facts.forward
    }
    saved = closure(facts, {i: d.action for i, d in decisions.items()})
    return RecomputePlan(decisions, *saved)


def cut(joint, facts, plan):
    write_tags(joint.module, facts, plan)
    return partition(joint.module, facts, plan, num_fwd_outputs=joint.num_forward_outputs)


def real_inputs(joint):
    torch.manual_seed(1)
    holders = joint.module.graph.find_nodes(op="placeholder")
    return [torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in holders]


def run_joint(joint, inputs):
    torch.manual_seed(2)
    results = torch.fx.Interpreter(joint.module).run(*inputs)
    return pytree.tree_leaves(results)


def run_cut(joint, forward, backward, inputs):
    """Forward, then backward, with the generator moved in between as another user would."""
    names = [n.name for n in joint.module.graph.find_nodes(op="placeholder")]
    by_name = dict(zip(names, inputs, strict=True))
    torch.manual_seed(2)
    outs = torch.fx.Interpreter(forward).run(
        *[by_name[n.name] for n in forward.graph.find_nodes(op="placeholder")]
    )
    torch.rand(7)
    results, kept = outs[: joint.num_forward_outputs], outs[joint.num_forward_outputs :]
    holders = backward.graph.find_nodes(op="placeholder")
    given_tensors = [by_name[n.name] for n in holders if n.name.startswith("tangents")]
    gradients = torch.fx.Interpreter(backward).run(*kept, *given_tensors)
    return [*results, *gradients]


def assert_bitwise(expected, got):
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a is None and b is None) or torch.equal(a, b), i


def compiled(joint, plan_of):
    """The captured graph compiled by AOTAutograd with our cut, everything as `plan_of` says."""
    facts = facts_of(joint)
    plan = make_plan(facts, plan_of)
    write_tags(joint.module, facts, plan)
    kept = {}

    def partition_fn(gm, _inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **_):
        kept["graphs"] = partition(
            gm,
            facts,
            plan,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
        return kept["graphs"]

    def as_it_is(gm, _inputs):
        def run(args):
            return torch.fx.Interpreter(gm).boxed_run(args)

        run._boxed_call = True
        return run

    fn = private.aot_compile_joint_with_descriptors(
        joint.descriptors, partition_fn=partition_fn, fw_compiler=as_it_is, bw_compiler=as_it_is
    )
    return fn, kept["graphs"]


@SLOW
@given(random_modules(), st.randoms(use_true_random=False))
def test_p13_the_two_graphs_equal_the_joint_graph_bitwise(module, rng):
    joint, facts = make_joint(module)
    expected = run_joint(joint, inputs := real_inputs(joint))
    for choose in (
        lambda v: "save",
        lambda v: "recompute",
        lambda v: rng.choice(("save", "recompute")),
    ):
        forward, backward = cut(joint, facts, make_plan(facts, choose))
        assert_bitwise(expected, run_cut(joint, forward, backward, inputs))


@SLOW
@given(random_modules(), st.randoms(use_true_random=False))
def test_p16_what_is_realised_and_run_is_what_was_planned(module, rng):
    joint, facts = make_joint(module)
    plan = make_plan(facts, lambda v: rng.choice(("save", "recompute")))
    forward, backward = cut(joint, facts, plan)
    names = lambda indices: [facts.values[i].name for i in indices]  # noqa: E731
    holders = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    realised = [n for n in holders if not n.startswith(("tangents", "rng_state"))]
    assert sorted(realised) == sorted(names((*plan.saved, *plan.saved_inputs)))
    # random replay renames the draws; everything else keeps its place
    random = {v.name for v in facts.values if v.random}
    for graph, order in (
        (forward, forward_order(facts, plan.saved)),
        (backward, backward_order(facts, plan.saved)),
    ):
        known = {v.name for v in facts.values} - random
        ran = [n.name for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
        assert [n for n in ran if n in known] == [n for n in names(order) if n not in random]


def test_recomputed_dropout_draws_the_same_mask_through_aotautograd():
    module = RandomModule(("dropout", "dropout", "plain"))
    joint, _ = make_joint(module)
    fn, (_, backward) = compiled(joint, lambda v: "recompute")
    assert any("run_with_rng_state" in str(n.target) for n in backward.graph.nodes)
    x = torch.randn(4, 4, requires_grad=True)
    check_against_eager(joint, fn, module, x)


def check_against_eager(joint, fn, module, x):
    """Output and gradients of `fn` equal those of the module itself under the same seed."""
    eager = copy.deepcopy(module)
    torch.manual_seed(3)
    expected = eager(x)
    seed = torch.randn_like(expected)
    torch.manual_seed(3)
    parameters = [
        module.get_parameter(n).detach().clone().requires_grad_() for n in joint.calling.parameters
    ]
    buffers = [module.get_buffer(n).clone() for n in joint.calling.buffers]
    wanted = [eager.get_parameter(n) for n in joint.calling.parameters]
    x2 = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    got = fn(*parameters, *buffers, x2)
    got = got[0] if isinstance(got, (tuple, list)) else got
    torch.testing.assert_close(got, expected)
    want = torch.autograd.grad(expected, [x, *wanted], seed, allow_unused=True)
    have = torch.autograd.grad(got, [x2, *parameters], seed, allow_unused=True)
    for a, b in zip(want, have, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(buffers, eager.buffers(), strict=False):
        torch.testing.assert_close(a, b)


def test_buffer_changed_in_place_then_read_gives_eager_gradients_with_all_recomputed():
    module = RandomModule(("buffer", "buffer"))
    joint, facts = make_joint(module)
    assert any(v.reads_mutated for v in facts.values)
    fn, _ = compiled(joint, lambda v: "recompute")
    check_against_eager(joint, fn, module, torch.randn(4, 4, requires_grad=True))


def test_an_altered_tag_is_refused_with_the_differences_both_ways():
    joint, facts = make_joint(RandomModule(("plain", "plain")))
    plan = make_plan(facts, lambda v: "save" if "mm" in v.op else "recompute")
    write_tags(joint.module, facts, plan)
    victim = facts.values[plan.saved[0]].name
    node = next(n for n in joint.module.graph.nodes if n.name == victim)
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    with pytest.raises(PartitionError, match=f"planned but not kept: .*{victim}"):
        partition(joint.module, facts, plan, num_fwd_outputs=joint.num_forward_outputs)
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    other = next(n for n in joint.module.graph.nodes if n.name.startswith("tanh"))
    other.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with pytest.raises(PartitionError, match=f"kept but not planned: .*{other.name}"):
        partition(joint.module, facts, plan, num_fwd_outputs=joint.num_forward_outputs)


def test_a_graph_rewritten_after_the_plan_is_refused():
    joint, facts = make_joint(RandomModule(("plain",)))
    plan = make_plan(facts, lambda v: "recompute")
    node = next(n for n in joint.module.graph.nodes if n.name.startswith("tanh"))
    with joint.module.graph.inserting_after(node):
        joint.module.graph.call_function(torch.ops.aten.sin.default, (node,))
    with pytest.raises(PartitionError, match="sin"):
        cut(joint, facts, plan)
    with pytest.raises(PartitionError, match="rewritten after the plan"):
        partition(joint.module, facts, plan, num_fwd_outputs=joint.num_forward_outputs)


def test_tags_stand_on_forward_nodes_only_and_getitem_follows_its_producer():
    joint, facts = make_joint(RandomModule(("norm", "dropout")))
    for node in joint.module.graph.nodes:
        node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE  # somebody else's
    plan = make_plan(facts, lambda v: "save" if v.op == "getitem" else "recompute")
    write_tags(joint.module, facts, plan)
    side = {v.name: v.side for v in facts.values}
    for node in joint.module.graph.nodes:
        assert ("recompute" in node.meta) == (side[node.name] == "forward")
        if side[node.name] == "forward" and "getitem" in node.name:
            assert node.meta["recompute"] is node.args[0].meta["recompute"]


def test_check_saved_names_both_sides():
    check_saved(["a", "b"], ["b", "a"])
    with pytest.raises(PartitionError, match=r"not kept: a; kept but not planned: c"):
        check_saved(["a", "b"], ["b", "c"])


def test_default_keeps_what_min_cut_keeps_and_leaves_the_graph_alone():
    joint, facts = make_joint(RandomModule(("plain", "norm", "dropout")))
    before = [(n.name, str(n.target), dict(n.meta)) for n in joint.module.graph.nodes]
    kept = default_saved(joint.module, frozenset(), joint.num_forward_outputs)
    after = [(n.name, str(n.target), dict(n.meta)) for n in joint.module.graph.nodes]
    assert [b[:2] for b in before] == [a[:2] for a in after]
    assert all(b[2].keys() == a[2].keys() for b, a in zip(before, after, strict=True))
    forward = {v.name for v in facts.forward}
    assert kept and kept <= forward
    deterministic = frozenset(n for n in kept if "dropout" not in n and "getitem" not in n)
    again = default_saved(joint.module, deterministic, joint.num_forward_outputs)
    assert again.isdisjoint(v.name for v in facts.forward if v.op == "aten.tanh.default")


def test_default_does_not_heed_the_memory_budget_of_pytorch():
    joint, _ = make_joint(RandomModule(("plain",)))
    plain = default_saved(joint.module, frozenset(), joint.num_forward_outputs)
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=0.1):
        pinned = default_saved(joint.module, frozenset(), joint.num_forward_outputs)
        assert functorch_config.activation_memory_budget == 0.1
    assert pinned == plain
