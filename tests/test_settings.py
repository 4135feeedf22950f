"""Whatever goes wrong, and wherever: torch's settings are as before, and the next module works."""

import copy
import threading

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch.distributed.tensor import Shard

import autop_ac.build
import autop_ac.capture.trace
import autop_ac.lowering.compile
import autop_ac.lowering.partition
import autop_ac.recompute.default
import autop_ac.recompute.pipeline
import autop_ac.runtime.parallel
import autop_ac.sharding.apply
from autop_ac import AutoParallel, fake_mesh
from tests.gpt import HintedGPT

CONFIGS = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)


class Broken(Exception):
    pass


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def settings():
    """Everything of torch's that we might touch, by value."""
    return (
        [copy.deepcopy(c.get_config_copy()) for c in CONFIGS],
        set(torch.fx.node._side_effectful_functions),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_grad_enabled(),
        torch._guards.TracingContext.try_get(),
        torch.fx.traceback.has_preserved_node_meta(),
        type(torch.ones(1)),
    )


@pytest.fixture
def mesh():
    return fake_mesh((2,))


def parallelize(mesh, backend="inductor", **ac):
    torch.manual_seed(0)
    ap = AutoParallel(Small(), lambda: torch.randn(4, 8), mesh)
    with ap.configure_ac(**ac).configure_compile(backend):
        ap.add_input_constraints([(Shard(0),)])
        ap.add_output_constraints([(Shard(0),)])
        ap.add_parameter_memory_constraint()
        return ap.apply_placement(ap.optimize_placement())


# what each stage calls while its own settings are in force
STAGES = {
    "capture, Dynamo": (autop_ac.capture.trace.private, "_dynamo_graph_capture_for_export"),
    "capture, joint": (autop_ac.capture.trace.private, "aot_export_joint_with_descriptors"),
    "capture, after": (autop_ac.capture.trace, "_describe"),
    "hints": (autop_ac.api, "resolve_hints"),
    "search": (autop_ac.build, "search_with"),
    "shard pass": (autop_ac.sharding.apply.private, "redistribute_local_tensor"),
    "recompute": (autop_ac.recompute.default.private, "min_cut_rematerialization_partition"),
    "tags": (autop_ac.recompute.pipeline, "write_tags"),
    "partition": (autop_ac.lowering.partition.private, "_extract_fwd_bwd_modules"),
    "compile": (autop_ac.lowering.compile.private, "compile_fx_inner"),
    "module": (autop_ac.build, "make_runner"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_a_stage_leaves_the_settings_and_the_next_module_works(
    stage, mesh, monkeypatch
):
    def broken(*args, **kwargs):
        raise Broken(stage)

    before = settings()
    with monkeypatch.context() as patched:
        patched.setattr(*STAGES[stage], broken)
        with pytest.raises(Exception, match=stage):
            parallelize(mesh)
        assert settings() == before
    parallelize(mesh, "eager")
    assert settings() == before


def test_a_good_run_leaves_the_settings_and_so_does_the_first_call(mesh):
    before = settings()
    parallel = parallelize(mesh)
    assert settings() == before
    x = torch.randn(2, 8)
    parallel(x).sum().backward()
    parallel.eval()
    parallel(x)
    assert settings() == before


def test_what_the_user_sets_inside_the_block_survives_it(mesh):
    ap = AutoParallel(Small(), lambda: torch.randn(4, 8), mesh).configure_compile("eager")
    patches = [
        (torch._inductor.config, "max_autotune_gemm"),
        (torch._functorch.config, "treat_parameters_as_free_to_save"),
        (torch._dynamo.config, "verbose"),
    ]
    before = [getattr(*patch) for patch in patches]
    try:
        with ap:
            plan = ap.optimize_placement()
            for (config, name), value in zip(patches, before, strict=True):
                setattr(config, name, not value)
            ap.apply_placement(plan)
        assert [getattr(*patch) for patch in patches] == [not value for value in before]
    finally:
        for (config, name), value in zip(patches, before, strict=True):
            setattr(config, name, value)


def test_backward_is_compiled_with_forward_and_sees_what_it_needs(mesh, monkeypatch):
    compiled = []
    real = autop_ac.lowering.compile.private.compile_fx_inner

    def counted(*args, **kwargs):
        compiled.append(kwargs["is_backward"])
        return real(*args, **kwargs)

    monkeypatch.setattr(autop_ac.lowering.compile.private, "compile_fx_inner", counted)
    parallel = parallelize(mesh)
    assert sorted(compiled) == [False, True]
    parallel(torch.randn(2, 8)).sum().backward()
    assert len(compiled) == 2


HOOKS = [
    ("functorch", "joint_custom_pass", 1),
    ("inductor", "joint_custom_pre_pass", 1),
    ("inductor", "joint_custom_post_pass", 1),
    ("inductor", "post_grad_custom_pre_pass", 2),
    ("inductor", "post_grad_custom_post_pass", 2),
]


@pytest.mark.parametrize(("where", "name", "times"), HOOKS)
def test_a_users_own_hook_runs_once_per_graph(where, name, times, mesh):
    config = torch._functorch.config if where == "functorch" else torch._inductor.config
    seen = []

    def hook(graph, *inputs):
        seen.append(graph)
        return graph

    with config.patch({name: hook}):
        parallelize(mesh)
        assert getattr(config, name) is hook
    assert len(seen) == times
    assert len({id(g) for g in seen}) == times


def test_a_users_pass_that_rewrites_the_joint_graph_is_part_of_what_is_planned(mesh):
    def double_relu(gm, inputs):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            with gm.graph.inserting_after(node):
                copy = gm.graph.node_copy(node, lambda n: n)
            copy.args = (node,)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, c=copy: user is not c)
        gm.recompile()
        return gm

    plain = parallelize(mesh, "eager")
    with torch._functorch.config.patch(joint_custom_pass=double_relu):
        parallel = parallelize(mesh, "eager")
    x = torch.randn(2, 8)
    assert torch.equal(plain(x), parallel(x))


def test_tags_are_written_after_the_collectives_are_in(mesh, monkeypatch):
    """Written on the captured graph, the tags would not reach what sharding inserts."""
    handed = []
    real = autop_ac.build.compile_local

    def spied(joint, module, partition, backend):
        handed.append(module)
        return real(joint, module, partition, backend)

    monkeypatch.setattr(autop_ac.build, "compile_local", spied)
    ap = AutoParallel(HintedGPT(), lambda: torch.randint(64, (8, 16)), mesh)
    with ap.configure_ac(stage_size=None).configure_compile("eager"):
        ap.add_parameter_memory_constraint()
        ap.apply_placement(ap.optimize_placement())
    (module,) = handed
    gathers = [
        n
        for n in module.graph.nodes
        if "all_gather_into_tensor" in str(n.target)
        and n.meta["custom"]["autop_ac"]["parameter"]
        and n.meta["partitioner_tag"] != "is_backward"
    ]
    assert gathers
    for node in gathers:
        assert node.meta["recompute"].name == "MUST_RECOMPUTE"
        assert {u.meta["recompute"].name for u in node.users} == {"MUST_RECOMPUTE"}
    inserted = [
        n
        for n in module.graph.nodes
        if n.op == "call_function"
        and not n.meta["custom"]["autop_ac"]["origin"]
        and n.meta["partitioner_tag"] == "is_forward"
    ]
    assert all("recompute" in n.meta for n in inserted)


def test_one_block_inside_another_and_a_patch_around_both(mesh):
    before = settings()
    with torch._functorch.config.patch(donated_buffer=False):
        patched = settings()
        assert patched != before
        outer = AutoParallel(Small(), lambda: torch.randn(4, 8), mesh).configure_compile("eager")
        with outer:
            plan = outer.optimize_placement()
            inner = parallelize(mesh)
            assert settings() == patched
            parallel = outer.apply_placement(plan)
        assert settings() == patched
    assert settings() == before
    for module in (inner, parallel):
        module(torch.randn(2, 8)).sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    assert settings() == before


def test_threads_compile_side_by_side_and_each_sees_its_own_settings(mesh):
    """Patches of torch's settings are a thread's own: a hook set in one is not run in the other."""
    before, found, seen = settings(), {}, {0: 0, 1: 0}
    barrier = threading.Barrier(2)

    def work(number):
        def hook(gm, inputs):
            seen[number] += 1
            return gm

        try:
            barrier.wait()
            with torch._functorch.config.patch(joint_custom_pass=hook):
                # each thread needs the mesh alone: the process group is the process's
                module = parallelize(mesh, "eager")
                assert torch._functorch.config.joint_custom_pass is hook
            assert torch._functorch.config.joint_custom_pass is None
            module(torch.ones(2, 8)).sum().backward()
            found[number] = [p.grad.to_local() for p in module.parameters()]
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [f for f in found.values() if isinstance(f, BaseException)]
    assert not errors, errors
    assert seen == {0: 1, 1: 1}
    assert all(torch.isfinite(g).all() for gradients in found.values() for g in gradients)
    assert settings() == before


def test_a_hook_of_inductor_runs_in_forward_and_in_backward_and_others_of_its_list_too(mesh):
    seen = []
    hooks = [lambda graph, n=n: seen.append((n, len(graph.nodes))) for n in range(2)]
    with torch._inductor.config.patch(post_grad_custom_post_pass=hooks[0]):
        parallelize(mesh)
    assert len(seen) == 2
    with torch._inductor.config.patch(joint_custom_post_pass=hooks):
        parallelize(mesh)
        assert torch._inductor.config.joint_custom_post_pass is hooks
    assert [n for n, _ in seen[2:]] == [0, 1]
