"""The all-gather contract and the hints, read off the two graphs that really run."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

import autop_ac.lowering.compile as compile_module
from autop_ac import AutoParallel, fake_mesh
from tests.gpt import GPT, GPTConfig, HintedGPT, RecomputedGPT

CONFIG = GPTConfig(vocab_size=64, dim=32, heads=4, layers=2, context=16)
aten = torch.ops.aten


@pytest.fixture
def partitions(monkeypatch):
    """The pairs of graphs that are compiled, in order; Inductor itself is left out."""
    seen = []
    real = compile_module.partition

    def spy(*args, **kwargs):
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(compile_module, "partition", spy)
    monkeypatch.setattr(
        compile_module.private,
        "compile_fx_inner",
        lambda gm, inputs, **_: compile_module._node_by_node(gm, inputs),
    )
    return seen


def apply(model, shape, ac, backend="eager", bucket="1 MiB", batch_size=8, **options):
    mesh = fake_mesh(shape)
    batch = (Shard(0), *[Replicate()] * (len(shape) - 1))
    ap = AutoParallel(
        model, lambda: torch.randint(64, (batch_size, CONFIG.context)), mesh, **options
    ).configure_ac(**ac)
    ap.configure_compile(backend).configure_comm(
        all_gather_bucket=bucket, reduce_scatter_bucket=bucket
    )
    with ap:
        ap.add_input_constraints([batch])
        ap.add_output_constraints([batch])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        parallel = ap.apply_placement(ap.optimize_placement())
    return parallel, ap.ac_report


def gathers(graph):
    """How often each parameter is gathered over each axis, by its name."""
    notes = [
        n.meta["custom"]["autop_ac"]
        for n in graph.graph.nodes
        if n.op == "call_function" and "all_gather" in str(n.target)
    ]
    # one collective may gather several
    return Counter(
        (name, note["axis"])
        for note in notes
        if note["parameter"]
        for name in note["parameter"].split(", ")
    )


def notes_of_saved(backward):
    return {
        n.name: n.meta["custom"]["autop_ac"]
        for n in backward.graph.nodes
        if n.op == "placeholder" and "autop_ac" in n.meta.get("custom", {})
    }


def read_by(graph, gather):
    """Nodes that read a gathered value together with something else, or as a result."""
    stack, seen, readers = [gather], {gather}, set()
    while stack:
        for user in stack.pop().users:
            others = [n for n in user.all_input_nodes if n not in seen]
            if others or user.op == "output":
                readers.add(user)
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return readers


OFF = {"enable": False}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize(
    ("ac", "bucket"),
    # what is computed again brings the whole bucket that one of its parameters is in
    [(OFF, "1 MiB"), (OFF, None), ({"stage_size": "auto"}, None), ({"stage_size": None}, None)],
    ids=str,
)
def test_backward_gathers_a_parameter_that_it_reads_once_and_keeps_no_gathered_weight(
    partitions, shape, ac, backend, bucket
):
    apply(HintedGPT(CONFIG), shape, ac, backend, bucket)
    ((forward, backward),) = partitions
    assert gathers(forward)
    found = gathers(backward)
    assert found
    saved = notes_of_saved(backward)
    assert not [n for n, note in saved.items() if note["parameter"] and not note["origin"]]
    assert set(found.values()) == {1}
    for node in backward.graph.nodes:
        if "all_gather" in str(node.target) and node.meta["custom"]["autop_ac"]["parameter"]:
            assert read_by(backward, node), node


def block_of(name):
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_gradient_is_reduced_before_backward_leaves_the_next_block(
    partitions, shape, param_dtype, backend
):
    """At the end of backward all gradients would be held whole, on each device."""
    policy = param_dtype and MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    with torch.device("meta"):  # so large that it is not cheaper to move activations
        model = GPT(dataclasses.replace(CONFIG, dim=512, layers=4))
    apply(model, shape, {"stage_size": None}, backend, batch_size=512, mp_policy=policy)
    ((_, backward),) = partitions
    reduced, below = set(), []
    for node in backward.graph.nodes:
        note = node.meta.get("custom", {}).get("autop_ac")
        if note is None or node.op != "call_function":
            continue
        if "reduce_scatter" in str(node.target) and note["parameter"]:
            blocks = {block_of(name) for name in note["parameter"].split(", ")} - {None}
            assert all(b <= below[-1] + 1 for b in blocks), node
            reduced |= blocks
        elif (
            node.target in (aten.mm.default, aten.addmm.default)
            and block_of(note["module"]) is not None
        ):
            below.append(block_of(note["module"]))
    assert reduced == set(range(4))


def test_gradients_of_norms_and_biases_are_summed_and_no_activation_is_moved_for_them(partitions):
    """Also where they are summed in another dtype than they are computed in."""
    config = GPTConfig(vocab_size=512, dim=512, heads=4, layers=2, context=256)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = GPT(config)
    numel = {name: p.numel() for name, p in model.named_parameters()}
    reduced = Counter()
    ap = AutoParallel(model, lambda: torch.randint(64, (512, 256)), fake_mesh((8,)), policy)
    with ap.configure_compile("eager").configure_device("H100"):
        ap.add_parameter_memory_constraint(0.0, 1 / 8)
        ap.apply_placement(ap.optimize_placement())
    ((_, backward),) = partitions
    for node in backward.graph.nodes:
        if str(node.target).startswith("_c10d") and "wait" not in str(node.target):
            values = pytree.tree_leaves(node.meta["val"])
            assert max(t.numel() for t in values) <= max(numel.values()), node
            note = node.meta["custom"]["autop_ac"]
            if "reduce" in str(node.target) and note["parameter"]:
                assert {t.dtype for t in values} == {torch.float32}
                reduced.update(note["parameter"].split(", "))
    # the weight of the head is that of the embedding: one sum of both gradients
    assert reduced == Counter(numel.keys() - {"positions.weight"})


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2048))
        self.linear = torch.nn.Linear(2048, 2048, bias=False)

    def forward(self, x):
        return self.linear(torch.tanh(x) * self.scale)


def test_no_activation_is_exchanged_for_the_gradient_of_a_scale(partitions):
    """It is summed over the batch; an exchange would not be hidden as what follows the sum is."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Scaled()
    ap = AutoParallel(model, lambda: torch.zeros(512, 256, 2048), fake_mesh((8,)), policy)
    with ap.configure_compile("eager").configure_device("H100"):
        ap.add_parameter_memory_constraint(0.0, 1 / 8)
        ap.apply_placement(ap.optimize_placement())
    ((_, backward),) = partitions
    for node in backward.graph.nodes:
        if str(node.target).startswith("_c10d"):
            values = pytree.tree_leaves(node.meta["val"])
            assert max(t.numel() for t in values) <= 2048 * 2048, node


class Reshaped(torch.nn.Module):
    """Two weights of one shape that are cast, permuted and cut before they are used, one of them twice."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(16, 4, 8))
        self.second = torch.nn.Parameter(torch.randn(16, 4, 8))

    def forward(self, x):
        first = self.first.permute(2, 1, 0)[:, :, :12].to(torch.bfloat16).reshape(8, 48)
        second = self.second.to(torch.bfloat16).permute(1, 2, 0)[..., 2:14].flatten(1)[:, :8]
        y = torch.tanh(x.to(torch.bfloat16) @ first)
        return (torch.sin(y[:, :4] @ second) @ second.T).float()


@pytest.mark.parametrize(
    "ac", [{"enable": False}, {}, {"stage_size": None}, {"memory_budget": "1 MiB"}], ids=str
)
def test_weights_that_are_cut_and_cast_after_the_gather_are_gathered_once_in_backward(
    partitions, ac
):
    mesh = fake_mesh((4,))
    ap = AutoParallel(Reshaped(), lambda: torch.randn(32, 8), mesh).configure_ac(**ac)
    with ap.configure_compile("eager"):
        ap.add_input_constraints([(Shard(0),)])
        ap.add_output_constraints([(Shard(0),)])
        ap.add_parameter_memory_constraint()
        ap.apply_placement(ap.optimize_placement())
    ((forward, backward),) = partitions
    assert {name for name, _ in gathers(forward)} == {"first", "second"}
    assert set(gathers(forward).values()) == {1}
    assert set(gathers(backward).values()) <= {1} and gathers(backward)
    saved = notes_of_saved(backward)
    assert not [n for n, note in saved.items() if note["parameter"] and not note["origin"]]


@pytest.mark.parametrize("ac", [{"enable": False}, {"stage_size": "auto"}], ids=str)
def test_without_resharding_backward_gathers_no_parameter_that_forward_gathered(partitions, ac):
    apply(GPT(CONFIG), (2,), ac, reshard_after_forward=False)
    ((forward, backward),) = partitions
    assert not set(gathers(forward)) & set(gathers(backward))


class SavesProducts(HintedGPT):
    save = (aten.mm,)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_hints_alone_keep_what_enters_the_blocks_and_the_products_that_are_read(partitions, shape):
    """Every product of the region is kept, or neither read nor computed again in backward."""
    config = dataclasses.replace(CONFIG, bias=False)
    _, report = apply(SavesProducts(config), shape, {"stage_size": None})
    ((forward, backward),) = partitions
    saved = notes_of_saved(backward)
    in_blocks = {n for n, note in saved.items() if note["module"].startswith("blocks.")}
    reasons = {s.name: s.reason for s in report.saved if s.name in in_blocks}
    entering = {n for n, reason in reasons.items() if reason.startswith("enters ac_region")}
    products = {n for n, reason in reasons.items() if reason.endswith("saves aten.mm")}
    assert in_blocks == entering | products
    # the input of the first block is what the embedding gives, wherever sharding moved it
    assert len(entering) == config.layers
    again = {n.name for n in backward.graph.nodes}
    computed = [n for n in forward.graph.nodes if n.target is aten.mm.default]
    of_blocks = [
        n for n in computed if n.meta["custom"]["autop_ac"]["module"].startswith("blocks.")
    ]
    assert len(of_blocks) == 4 * config.layers
    kept = 0
    for node in of_blocks:
        copies = {node.name} | {n.name for n in moved(node)}
        if copies & products:
            kept += 1
        else:
            assert not copies & again, node
    assert kept >= 3 * config.layers


def origin(node):
    return node.meta["custom"]["autop_ac"]["origin"]


def moved(node):
    """Views of a value, and what sharding inserted after it to bring it elsewhere."""
    found, stack = set(), [node]
    while stack:
        for user in stack.pop().users:
            if user.op != "call_function" or user in found:
                continue
            is_view = getattr(user.target, "is_view", False)
            if is_view or user.target is aten._unsafe_view.default or not origin(user):
                found.add(user)
                stack.append(user)
    return found


def test_everything_recomputed_keeps_less_than_off(partitions):
    _, off = apply(RecomputedGPT(CONFIG), (2,), {"enable": False})
    _, full = apply(RecomputedGPT(CONFIG), (2,), {"stage_size": None})
    assert full.kept_bytes < off.kept_bytes


@pytest.mark.parametrize("ac", [{}, {"enable": False}], ids=str)
def test_names_and_state_are_the_users(partitions, ac):
    model = GPT(CONFIG)
    parallel, _ = apply(model, (2,), ac)
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in parallel.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert isinstance(parallel, GPT)
    assert type(parallel) is not GPT


def test_a_meta_model_is_initialised_as_on_one_device():
    with torch.device("meta"):
        model = GPT(CONFIG)
    parallel, _ = apply(model, (1,), {})
    parallel.to_empty(device="cpu")
    torch.manual_seed(3)
    parallel.init_weights()
    torch.manual_seed(3)
    single = GPT(CONFIG)
    torch.manual_seed(3)
    single.init_weights()
    for (name, got), expected in zip(parallel.named_parameters(), single.parameters()):
        assert torch.equal(got.full_tensor(), expected), name


def test_mixed_precision_computes_in_the_policys_dtype(partitions):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallel, _ = apply(GPT(CONFIG), (2,), {}, mp_policy=policy)
    assert {p.dtype for p in parallel.parameters()} == {torch.float32}
    ((forward, backward),) = partitions
    products = [n for n in forward.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}
    reduced = [n for n in backward.graph.nodes if "reduce_scatter" in str(n.target)]
    of_parameters = [n for n in reduced if n.meta["custom"]["autop_ac"]["parameter"]]
    given = [t for n in of_parameters for t in pytree.tree_leaves(n.meta["val"])]
    assert {t.dtype for t in given} <= {torch.float32}
