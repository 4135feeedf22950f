"""The search: options right on numbers, cheapest plans, limits kept, conflicts named."""

import itertools
import math
import operator
import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from autop_ac.capture.trace import capture, request
from autop_ac.errors import ConfigError, InfeasibleError, SolverError
from autop_ac.graph.devices import Topology, find_device
from autop_ac.sharding import rules
from autop_ac.sharding.build import build_problem
from autop_ac.sharding.chains import CASTS, PLAIN_VIEWS
from autop_ac.sharding.constraints import Constraints
from autop_ac.sharding.costs import RedistributionCosts
from autop_ac.sharding.formulation import evaluate
from autop_ac.sharding.groups import Settings
from autop_ac.sharding.layout import divides, even_local_shape, local_bytes
from autop_ac.sharding.local_args import local_sizes
from autop_ac.sharding.option import leaves_of, outputs_of
from autop_ac.sharding.options import OptionFinder
from autop_ac.sharding.rules import axis_rows
from autop_ac.sharding.search import search
from autop_ac.sharding.solve import solve
from tests.gpt import GPT, GPTConfig

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")
aten = torch.ops.aten
H100 = find_device("H100")


@pytest.fixture
def fake_mesh():
    """A function that makes a mesh of any shape without processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(*shape):
        dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
        return init_device_mesh("cpu", shape)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def plan(joint, mesh, constraints=None, topology=None, **kwargs):
    topology = topology or Topology.from_mesh_shape(tuple(mesh.shape))
    return search(
        joint, mesh, constraints or Constraints(), device=H100, topology=topology, **kwargs
    )


class MLP(torch.nn.Module):
    def __init__(self, dim=8, hidden=16, bias=True):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden, bias=bias)
        self.down = torch.nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def mlp_joint(batch=8, dim=8, hidden=16, bias=True):
    return capture(request(MLP(dim, hidden, bias), lambda: torch.randn(batch, dim)))


def gpt_joint(batch=8, **sizes):
    config = GPTConfig(**sizes)
    return capture(
        request(GPT(config), lambda: torch.randint(0, config.vocab_size, (batch, config.context)))
    )


# ------------------------------------------------------------- options on real numbers


class Recorder(torch.fx.Interpreter):
    """Runs a joint graph on real tensors and keeps the arguments and result of each operator."""

    def __init__(self, module):
        super().__init__(module)
        self.seen = {}

    def run_node(self, node):
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        result = super().run_node(node)
        if node.op == "call_function" and node.target is not operator.getitem:
            self.seen[node] = (args, kwargs, result)
        return result


def real_inputs(joint, vocab=64):
    torch.manual_seed(0)
    made = []
    for node in joint.module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta["val"]
        if value.is_floating_point():
            made.append(torch.randn(value.shape, dtype=value.dtype))
        else:
            made.append(torch.randint(0, vocab, value.shape, dtype=value.dtype))
    return made


def parts(tensor, placement):
    if isinstance(placement, Shard):
        return [p.contiguous() for p in tensor.chunk(2, placement.dim)]  # as collectives give them
    if isinstance(placement, Partial):
        noise = torch.randn_like(tensor)
        whole = 2 * tensor if placement.reduce_op == "avg" else tensor
        return [noise, whole - noise]
    return [tensor, tensor]


def whole(pieces, placement):
    if isinstance(placement, Shard):
        return torch.cat(pieces, placement.dim)
    if isinstance(placement, Partial):
        total = pieces[0] + pieces[1]
        return total / 2 if placement.reduce_op == "avg" else total
    torch.testing.assert_close(pieces[0], pieces[1])
    return pieces[0]


def check_option(node, args, kwargs, result, option):
    """Run the operator on each of two devices' parts and put the results together again."""
    values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    wanted = [p[0] for p in option.inputs if p is not None]
    split = [parts(v, p) for v, p in zip(values, wanted, strict=True)]
    value = node.meta["val"]
    first = option.outputs[0]
    shape = None
    if isinstance(value, torch.Tensor) and first is not None:
        shape = even_local_shape(value.shape, first, (2,))
    found = []
    for rank in range(2):
        queue = iter(piece[rank] for piece in split)
        local_args, local_kwargs = pytree.tree_map(
            lambda a, queue=queue: next(queue) if isinstance(a, torch.Tensor) else a, (args, kwargs)
        )
        local_args = local_sizes(node.target, local_args, value, shape)
        out = node.target(*local_args, **local_kwargs)
        found.append(out if isinstance(out, (tuple, list)) else (out,))
    results = result if isinstance(result, (tuple, list)) else (result,)
    for i, (expected, placements) in enumerate(zip(results, option.outputs, strict=True)):
        if placements is None:
            continue
        got = whole([f[i] for f in found], placements[0])
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


class Odds(torch.nn.Module):
    """Operators that a transformer of ours lacks."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 8, 3, padding=1)
        self.group = torch.nn.GroupNorm(2, 8)
        self.out = torch.nn.Linear(8, 4)

    def forward(self, x):
        y = self.group(self.conv(x)).transpose(1, 2)
        y = torch.nn.functional.silu(self.out(y))
        y = torch.nn.functional.pad(y, (0, 2)).roll(1, 1)
        y = torch.cat([y[:, ::2], y.flip(1)[:, :4]], 1)
        y = (
            y / (y.norm(dim=-1, keepdim=True) + 1)
            + y.mean(1, keepdim=True)
            + y.var(-1, keepdim=True)
        )
        y = y * y.softmax(-1).cumsum(1) + y.expand(2, *y.shape)[0].amax(-1, keepdim=True)
        scores = torch.einsum("bsd,btd->bst", y, y).masked_fill(y[:, :, :1] > 0, -1.0)
        return torch.logsumexp(scores.tril(), -1) + y.topk(2, -1)[0].sum(-1)


def losses(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.filterwarnings("ignore:no sharding rule:UserWarning")
@pytest.mark.parametrize("model", ["gpt", "gpt_loss", "odds"])
def test_every_option_is_right_on_numbers(fake_mesh, model):
    if model == "odds":
        joint = capture(request(Odds(), lambda: torch.randn(4, 4, 8)))
    elif model == "gpt":
        joint = gpt_joint(4)
    else:
        config = GPTConfig(tied=False)
        joint = capture(
            request(
                GPT(config),
                lambda: (torch.randint(0, 64, (4, 16)), torch.randint(0, 64, (4, 16))),
                loss_fn=losses,
            )
        )
    recorder = Recorder(joint.module)
    recorder.run(*real_inputs(joint))
    finder = OptionFinder(fake_mesh(2), H100)
    wrong, checked, seen = [], 0, set()
    for node, (args, kwargs, result) in recorder.seen.items():
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        found = finder.options(node)
        if id(found) in seen:
            continue
        seen.add(id(found))
        for option in found:
            tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            partial_ints = any(
                p is not None and isinstance(p[0], Partial) and not t.is_floating_point()
                for p, t in zip(option.inputs, tensors, strict=False)
            )
            if partial_ints:
                continue
            checked += 1
            try:
                check_option(node, args, kwargs, result, option)
            except AssertionError as error:
                text = str(error).splitlines()[-3:]
                wrong.append(f"{node.target} {option.inputs} -> {option.outputs}: {text}")
    assert not wrong, "\n".join(wrong)
    assert checked > 50


def test_attention_is_sharded_by_batch_and_head(fake_mesh):
    joint = gpt_joint(4)
    finder = OptionFinder(fake_mesh(2), H100)
    nodes = [n for n in joint.module.graph.nodes if "flash_attention" in str(n.target)]
    assert len(nodes) == 4
    for node in nodes:
        got = {o.outputs[0] for o in finder.options(node)}
        assert got == {(R,), (S0,), (S1,)}


def test_operator_without_rule_is_replicated_with_a_warning(fake_mesh):
    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return torch.as_strided(x, (8, 8), (8, 1), 0) * self.w

    joint = capture(request(Strange(), lambda: torch.randn(8, 8)))
    with pytest.warns(UserWarning, match=r"no sharding rule for aten\.as_strided.*test_sharding"):
        found = plan(joint, fake_mesh(2))
    assert any("as_strided" in note for note in found.notes)
    node = next(n for n in joint.module.graph.nodes if "as_strided" in str(n.target))
    assert found.choices[node.name].outputs == ((R,),)


# ------------------------------------------------------------- redistribution


def test_moves_are_priced_per_axis():
    topology = Topology((1e9, 1e10), (0.0, 0.0))
    costs = RedistributionCosts((2, 4), topology, 1e30)
    value = torch.empty(16, 16, device="meta")
    size = 16 * 16 * 4
    assert costs.seconds(value, (S0, R), (R, R)) == pytest.approx(size / 2 / 1e9)
    assert costs.seconds(value, (R, S0), (R, R)) == pytest.approx(size * 3 / 4 / 1e10)
    assert costs.seconds(value, (P, R), (R, R)) == pytest.approx(size / 1e9)
    assert costs.seconds(value, (P, R), (S0, R)) == pytest.approx(size / 2 / 1e9)
    assert costs.seconds(value, (R, R), (S0, S1)) == 0
    assert costs.seconds(value, (R, R), (P, R)) is None
    assert costs.seconds(value, (S0, R), (P, R)) is None
    # the outer of two shards of one dim can only go when the inner is gathered
    inner = size / 2 * 3 / 4 / 1e10
    assert costs.seconds(value, (S0, S0), (R, S0)) == pytest.approx(inner + size / 2 / 1e9)


def test_uneven_shards_are_gathered_but_not_exchanged():
    costs = RedistributionCosts((4,), Topology((1e9,), (0.0,)), 1e30)
    value = torch.empty(10, 8, device="meta")
    assert local_bytes((10, 8), 4, (S0,), (4,)) == 3 * 8 * 4
    assert costs.seconds(value, (S0,), (R,)) == pytest.approx(3 * 4 * 8 * 4 * 3 / 4 / 1e9)
    assert costs.seconds(value, (S0,), (S1,)) is None


# ------------------------------------------------------------- the cheapest plan


def brute_force(problem):
    best = math.inf
    for chosen in itertools.product(*(range(len(o)) for o in problem.options)):
        try:
            best = min(best, evaluate(problem, chosen))
        except SolverError:
            continue
    return best


class Tiny(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(rows, 4))

    def forward(self, x):
        return x @ self.w


@pytest.mark.parametrize("rows", [4, 64, 4096])
@pytest.mark.parametrize("high", [None, 0.5])
def test_plan_costs_what_brute_force_finds(fake_mesh, rows, high):
    joint = capture(request(Tiny(rows), lambda: torch.randn(4, rows)))
    mesh = fake_mesh(2)
    constraints = Constraints(parameter_high=high)
    settings = Settings(mesh, H100, Topology((1e9,), (1e-7,)))
    problem = build_problem(joint, constraints, settings).problem
    assert 1 < math.prod(len(o) for o in problem.options) < 200_000
    chosen, _ = solve(problem, gap=0.0)
    assert evaluate(problem, chosen) == pytest.approx(brute_force(problem), rel=1e-6)


def test_a_dear_link_changes_the_plan(fake_mesh):
    mesh = fake_mesh(2, 2)
    joint = mlp_joint(batch=64, dim=256, hidden=1024)
    spec = ((S0, R),)
    constraints = Constraints(spec, spec, parameter_high=0.5)
    plans = [
        plan(joint, mesh, constraints, Topology(bandwidth, (1e-6, 1e-6)))
        for bandwidth in ((1e11, 1e10), (1e10, 1e11))
    ]
    assert plans[0].parameters != plans[1].parameters


def test_equal_calls_give_equal_plans(fake_mesh):
    mesh, joint = fake_mesh(2), mlp_joint()
    first, second = plan(joint, mesh), plan(joint, mesh)
    assert first.choices == second.choices


# ------------------------------------------------------------- limits


def parameter_fraction(joint, found):
    held = total = 0
    for node in joint.module.graph.nodes:
        if node.op == "placeholder" and joint.placeholders[node.name].kind == "parameter":
            value = node.meta["val"]
            placements = found.choices[node.name].outputs[0]
            held += local_bytes(value.shape, value.element_size(), placements, found.mesh_shape)
            total += value.numel() * value.element_size()
    return held / total


@pytest.mark.parametrize("shape", [(2,), (8,), (2, 2)])
def test_fsdp_of_a_gpt(fake_mesh, shape):
    mesh = fake_mesh(*shape)
    joint = gpt_joint(batch=64, vocab_size=8192, dim=512, heads=8, context=512, tied=False)
    devices = math.prod(shape)
    spec = ((S0,) * len(shape),)
    started = time.monotonic()
    found = plan(joint, mesh, Constraints(spec, spec, parameter_high=1 / devices))
    assert time.monotonic() - started < 30
    assert parameter_fraction(joint, found) <= 1.05 / devices
    for node in joint.module.graph.nodes:
        if "addmm" in str(node.target):  # the whole weight, this device's part of the batch
            assert found.choices[node.name].outputs == ((S0,) * len(shape),)
    kinds = {
        p for n, ps in found.parameters.items() if ".weight" in n and "norm" not in n
        for p in ps
    }  # fmt: skip
    assert kinds <= {S0, S1}
    check_ports(joint, found)


def check_ports(joint, found):
    """Results leave as the ports demand."""
    output = joint.module.graph.output_node()
    brought = iter(found.choices[output.name].inputs)
    by_index = {}
    for port, result in zip(joint.results, output.args[0], strict=True):
        if not isinstance(result, torch.fx.Node):
            continue
        placements = next(brought)
        if port.kind in ("gradient", "mutation"):
            assert placements == found.parameters[port.name]
        if port.kind == "output":
            by_index[port.index] = placements
    assert next(brought, None) is None
    for name, port in joint.placeholders.items():
        if port.kind == "tangent":
            expected = tuple(R if isinstance(p, Partial) else p for p in by_index[port.index])
            assert found.choices[name].outputs[0] == expected


@pytest.mark.parametrize("shape", [(2,), (8,), (2, 2)])
def test_a_toy_gpt_is_spread_over_the_devices_too(fake_mesh, shape, capfd):
    mesh, joint = fake_mesh(*shape), gpt_joint(8)
    devices = math.prod(shape)
    spec = ((S0,) * len(shape),)
    found = plan(joint, mesh, Constraints(spec, spec, parameter_high=1 / devices))
    assert parameter_fraction(joint, found) <= 1.05 / devices
    for node in joint.module.graph.nodes:
        if "addmm" in str(node.target):
            assert R not in found.choices[node.name].outputs[0]
    assert capfd.readouterr().out == ""


def test_every_node_has_a_choice_of_its_shape(fake_mesh):
    joint = gpt_joint(8)
    found = plan(joint, fake_mesh(2), Constraints(parameter_high=0.5))
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            choice = found.choices[node.name]
            assert len(choice.inputs) == len(leaves_of(node))
            assert len(choice.outputs) == len(outputs_of(node))
    total = sum(c.compute_s + c.redistribute_s for c in found.choices.values())
    assert found.objective_s == pytest.approx(total - found.hidden_s)


def test_lower_memory_bound_keeps_parameters_whole(fake_mesh):
    joint = mlp_joint()
    found = plan(joint, fake_mesh(2), Constraints(parameter_low=1.0))
    assert parameter_fraction(joint, found) == 1.0


def test_a_bias_that_cannot_be_cut_is_allowed_for(fake_mesh):
    joint = mlp_joint(dim=3, hidden=64)
    found = plan(joint, fake_mesh(8), Constraints(parameter_high=1 / 8))
    assert found.parameters["down.bias"] == (R,)
    assert found.parameters["up.weight"] == (S0,)


def test_uneven_parameters_are_gathered_before_use(fake_mesh):
    joint = mlp_joint(dim=8, hidden=15)
    found = plan(joint, fake_mesh(2), Constraints(parameter_high=0.55))
    assert parameter_fraction(joint, found) <= 0.55
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        for value, placements in zip(outputs_of(node), found.choices[node.name].outputs):
            if value is not None:
                assert divides(value.shape, placements, (2,))


def test_conflict_of_memory_and_node_is_named(fake_mesh):
    constraints = Constraints(parameter_high=0.5, nodes={"up.weight": (R,)})
    with pytest.raises(
        InfeasibleError, match="parameter memory and node 'up.weight'.*What would do"
    ) as caught:
        plan(mlp_joint(), fake_mesh(2), constraints)
    assert caught.value.smallest_bytes > caught.value.budget_bytes > 0


def test_node_constraint_is_kept_and_misspelling_is_helped(fake_mesh):
    mesh, joint = fake_mesh(2), mlp_joint()
    node = next(n for n in joint.module.graph.nodes if "addmm" in str(n.target))
    found = plan(joint, mesh, Constraints(nodes={node.name: (S1,)}))
    assert found.choices[node.name].outputs == ((S1,),)
    with pytest.raises(ConfigError, match="did you mean .*up.weight"):
        plan(joint, mesh, Constraints(nodes={"up.weigth": (R,)}))
    with pytest.raises(ConfigError, match="its placements are"):
        plan(joint, mesh, Constraints(nodes={node.name: (Shard(7),)}))


@pytest.mark.parametrize(
    ("constraints", "text"),
    [
        (Constraints(inputs=((S0,), (S0,))), r"2 input constraints .* 1 input tensors.*\(9, 8\)"),
        (Constraints(outputs=((S0, S0),)), r"output 0 of shape \(9, 8\).*one per mesh axis"),
        (Constraints(inputs=((S0,),)), r"input 0 of shape \(9, 8\) on a mesh of shape \(2,\)"),
        (Constraints(inputs=((P,),)), "cannot be Partial"),
    ],
)
def test_constraints_that_do_not_fit_show_both_shapes(fake_mesh, constraints, text):
    with pytest.raises(ConfigError, match=text):
        plan(mlp_joint(batch=9), fake_mesh(2), constraints)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_fraction_out_of_range_is_refused(value):
    with pytest.raises(ConfigError, match="fraction"):
        Constraints(parameter_high=value)


def test_by_default_the_batch_is_sharded_on_the_first_axis(fake_mesh):
    joint = mlp_joint(batch=8)
    found = plan(joint, fake_mesh(2, 2))
    name = next(n for n, p in joint.placeholders.items() if p.kind == "input")
    assert found.choices[name].outputs == ((S0, R),)
    check_ports(joint, found)


def test_gradients_are_reduced_after_the_cast(fake_mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = MLP(1024, 4096)
    joint = capture(request(model, lambda: torch.randn(16384, 1024), mp_policy=policy))
    mesh = fake_mesh(2)
    spec = ((S0,),)
    constraints = Constraints(spec, spec, parameter_high=0.5)

    def early_sums(found):
        """Gradients summed over devices before they are cast."""
        count = 0
        for port, node in zip(joint.results, joint.module.graph.output_node().args[0]):
            if port is None or port.kind != "gradient":
                continue
            assert node.target is torch.ops.aten._to_copy.default
            while node.target in CASTS + PLAIN_VIEWS:
                wanted = found.choices[node.name].inputs[0]
                node = node.args[0]
                have = found.choices[node.name].outputs[0]
                count += isinstance(have[0], Partial) and have != wanted
        return count

    assert early_sums(plan(joint, mesh, constraints, reduce_dtype=torch.float32)) == 0
    assert early_sums(plan(joint, mesh, constraints)) > 0


def attention_calls():
    """Attention of CUDA and its backward, with the arguments that the dispatcher gives."""
    q = torch.empty(4, 8, 32, 16, device="cuda", dtype=torch.bfloat16)
    flash = aten._scaled_dot_product_flash_attention.default
    out, lse, cum_q, cum_k, most_q, most_k, seed, offset, _ = flash(q, q, q, 0.0, True)
    ends = (cum_q, cum_k, most_q, most_k, 0.0, True)
    yield flash, (q, q, q, 0.0, True)
    flash_backward = aten._scaled_dot_product_flash_attention_backward.default
    yield flash_backward, (q, q, q, q, out, lse, *ends, seed, offset)
    efficient = aten._scaled_dot_product_efficient_attention.default
    out, lse, seed, offset = efficient(q, q, q, None, True)
    yield efficient, (q, q, q, None, True)
    efficient_backward = aten._scaled_dot_product_efficient_attention_backward.default
    mask = [True, True, True, False]
    yield efficient_backward, (q, q, q, q, None, out, lse, seed, offset, 0.0, mask)
    cudnn = aten._scaled_dot_product_cudnn_attention.default
    out, lse, cum_q, cum_k, most_q, most_k, seed, offset, _ = cudnn(q, q, q, None, True)
    ends = (cum_q, cum_k, most_q, most_k, 0.0, False)
    yield cudnn, (q, q, q, None, True)
    cudnn_backward = aten._scaled_dot_product_cudnn_attention_backward.default
    yield cudnn_backward, (q, q, q, q, out, lse, seed, offset, None, *ends)


def test_attention_of_cuda_is_cut_along_batch_and_heads(fake_mesh):
    mesh = fake_mesh(2)
    with FakeTensorMode():
        for op, args in attention_calls():
            outs = op(*args)
            outs = tuple(o if isinstance(o, torch.Tensor) else None for o in outs)
            rows = axis_rows(op, args, {}, outs, mesh)
            assert {row[0][0] for row in rows} >= {S0, S1}, op


def test_a_rule_that_wants_all_arguments_is_given_the_defaults_too(fake_mesh):
    mesh = fake_mesh(2)
    with FakeTensorMode():
        a = torch.empty(16, 32, device="cuda").to(torch.float8_e4m3fn)
        b = torch.empty(64, 32, device="cuda").to(torch.float8_e4m3fn).t()
        one = torch.ones(1, device="cuda")
        op, args = aten._scaled_mm.default, (a, b, one, one)
        outs = (op(*args, out_dtype=torch.bfloat16),)
        for kwargs in ({}, {"out_dtype": torch.bfloat16}):
            rows = axis_rows(op, args, kwargs, outs, mesh)
            assert {row[0][0] for row in rows} >= {S0, S1}


def test_rows_of_which_none_can_be_taken_are_no_rule(fake_mesh, monkeypatch):
    """Where there is no rule a warning says so."""
    op, mesh, x = aten.cos.default, fake_mesh(2), torch.randn(4)
    assert {row[0][0] for row in axis_rows(op, (x,), {}, (x,), mesh)} >= {S0}
    rows = [([Partial("max")], [Partial("max")])]
    monkeypatch.setattr(rules, "OWN_RULES", {op: lambda *_: rows})
    assert axis_rows(op, (x,), {}, (x,), mesh) is None
    monkeypatch.setattr(rules, "OWN_RULES", {op: lambda *_: []})
    assert axis_rows(op, (x,), {}, (x,), mesh) == []
