"""The parallel module behaves as the user's: training modes, dropout, batch norm."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from autop_ac import AutoParallel, UsageError, ac_region, fake_mesh, launch
from autop_ac.graph.random import random_nodes
from autop_ac.lowering import compile as compile_module


class Moody(torch.nn.Module):
    """Everything that train() and eval() change."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


def parallelized(model, inputs, backend="eager", mesh=None, **ac):
    ap = AutoParallel(model, inputs, mesh or fake_mesh((1,)))
    with ap.configure_compile(backend).configure_ac(**ac):
        ap.add_parameter_memory_constraint()
        return ap.apply_placement(ap.optimize_placement())


def test_eval_and_train_are_those_of_the_model():
    model = Moody()
    parallel = parallelized(model, lambda: torch.randn(16, 8))
    x = torch.randn(16, 8)
    for _ in range(3):
        parallel(x).sum().backward()
    norm = parallel.first[1]
    before = norm.running_mean.full_tensor().clone()
    assert before.abs().sum() > 0
    model.load_state_dict({k: v.full_tensor() for k, v in parallel.state_dict().items()})
    model.eval()
    parallel.eval()
    with torch.no_grad():
        assert torch.allclose(parallel(x), model(x), atol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(parallel(x), model(x), atol=1e-6)
    assert torch.equal(norm.running_mean.full_tensor(), before)
    parallel.train()
    assert (parallel(x) == parallel(x)).float().mean() < 0.5
    assert not torch.equal(norm.running_mean.full_tensor(), before)


def test_a_part_in_eval_mode_is_in_eval_mode_and_has_gradients():
    model = Moody()
    parallel = parallelized(model, lambda: torch.randn(16, 8))
    x = torch.randn(16, 8)
    for module in (model, parallel):
        module.first.eval()
        module.drop.eval()
    loss = parallel(x).square().sum()
    loss.backward()
    model(x).square().sum().backward()
    for (name, a), b in zip(parallel.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-5), name


def test_a_mode_is_traced_once(monkeypatch):
    made = []
    real = compile_module.partition
    monkeypatch.setattr(
        compile_module, "partition", lambda *a, **k: made.append(1) or real(*a, **k)
    )
    parallel = parallelized(Moody(), lambda: torch.randn(16, 8))
    x = torch.randn(16, 8)
    for mode in (True, False, True, False):
        parallel.train(mode)
        parallel(x)
    assert len(made) == 2


class Masked(torch.nn.Module):
    """Its output shows the mask of forward, its gradient the one of backward."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        with ac_region():
            out = torch.sigmoid(x * self.weight * 2)  # something to recompute
            return F.dropout(out, 0.5) * 1.0


def masks(shape, backend, ac):
    """This rank's coordinate and mask, and whether its gradient shows the same mask."""
    torch.manual_seed(5)
    axes = ("dp", "tp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    batch = (Shard(0), *[Replicate()] * (len(shape) - 1))
    ap = AutoParallel(Masked(), lambda: torch.ones(8, 64), mesh)
    with ap.configure_ac(**ac).configure_compile(backend):
        ap.add_input_constraints([batch])
        ap.add_output_constraints([batch])
        ap.add_parameter_memory_constraint()
        parallel = ap.apply_placement(ap.optimize_placement())
    x = torch.ones(8 // shape[0], 64)
    found = []
    for _ in range(2):
        parallel.zero_grad()
        out = parallel(x)
        out.sum().backward()
        kept = (out != 0).float()
        every = torch.zeros(shape[0], *kept.shape)
        every[mesh.get_coordinate()[0]] = kept
        torch.distributed.all_reduce(every, group=mesh.get_group(0))
        slope = 2 * 2 * torch.sigmoid(torch.tensor(2.0)) * (1 - torch.sigmoid(torch.tensor(2.0)))
        expected = every.sum((0, 1)) * slope
        found.append((kept, torch.allclose(parallel.weight.grad.full_tensor(), expected, 1e-5)))
    return tuple(mesh.get_coordinate()), found


@pytest.mark.parametrize(
    ("shape", "backend", "ac"),
    [
        ((2,), "eager", {"enable": False}),
        ((2,), "eager", {"stage_size": None}),
        ((2,), "inductor", {"stage_size": None}),
        ((2, 2), "eager", {}),
    ],
    ids=str,
)
def test_dropout_is_equal_where_replicated_independent_where_sharded_and_the_same_in_backward(
    shape, backend, ac
):
    by_coordinate = dict(launch(masks, torch.Size(shape).numel(), shape, backend, ac))
    for found in by_coordinate.values():
        assert all(same for _, same in found)
        first, second = (kept for kept, _ in found)
        assert 0.3 < first.mean() < 0.7
        assert not torch.equal(first, second)
    for a, (of_a, *_) in by_coordinate.items():
        for b, (of_b, *_) in by_coordinate.items():
            if a < b:
                assert torch.equal(of_a[0], of_b[0]) == (a[0] == b[0]), (a, b)


class Twice(torch.nn.Module):
    """One dropout that is sharded along both axes, one along the first alone."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        x = x * self.weight
        return F.dropout(x, 0.5), F.dropout(x, 0.5)


def mixed_masks(backend):
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = (Shard(0), Replicate())
    ap = AutoParallel(Twice(), lambda: torch.ones(8, 64), mesh).configure_compile(backend)
    with ap:
        ap.add_input_constraints([batch])
        ap.add_output_constraints([batch, batch])
        first, second = random_nodes(ap._joint.module.graph)
        ap.sharding_optimizer.add_node_constraint(first, (Shard(0), Shard(1)))
        ap.sharding_optimizer.add_node_constraint(second, batch)
        parallel = ap.apply_placement(ap.optimize_placement())
    first, second = parallel(torch.ones(4, 64))
    return tuple(mesh.get_coordinate()), first != 0, second != 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_dropouts_may_be_sharded_along_different_axes(backend):
    found = {c: (a, b) for c, a, b in launch(mixed_masks, 4, backend)}
    for which in (0, 1):
        for dp in (0, 1):
            assert torch.equal(found[dp, 0][which], found[dp, 1][which])
        assert not torch.equal(found[0, 0][which], found[1, 0][which])
    # the parts along the second axis are drawn independently, and the two masks too
    halves = found[0, 0][0].chunk(2, 1)
    assert not torch.equal(*halves)
    assert not torch.equal(*found[0, 0])


class Permuted(torch.nn.Module):
    """`randperm` draws from the generator: PyTorch has no decomposition of it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = x[:, torch.randperm(8)]
        return F.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_with_an_operator_that_draws_by_itself_draws_from_the_generator(backend):
    model = Permuted()
    parallel = parallelized(model, lambda: torch.randn(16, 8), backend)
    out = parallel(torch.randn(16, 8))
    assert 0.2 < (out == 0).float().mean() < 0.8


VIEWS = {
    "of an input": lambda x, h: (h, x.view(-1, 2)),
    "of another output": lambda x, h: (h, h.view(-1, 2)),
    "two of one tensor": lambda x, h: (h[:, :4], h[:, 4:].unflatten(1, (2, 2))),
    "the input": lambda x, h: (h, x),
    "detached": lambda x, h: (h, h.detach()),
}


class GivesViews(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x):
        return VIEWS[self.kind](x, self.linear(x))


def views():
    """Outputs and gradients of each kind, on this rank, against the single-process model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = mesh.get_rank()
    for kind in VIEWS:
        torch.manual_seed(0)
        model, x = GivesViews(kind), torch.randn(4, 8)
        ap = AutoParallel(model, lambda: torch.randn(4, 8), mesh).configure_compile("eager")
        with ap:
            ap.add_output_constraints([(Shard(0),), (Shard(0),)])
            ap.add_parameter_memory_constraint()
            parallel = ap.apply_placement(ap.optimize_placement())
        got, expected = parallel(x.chunk(2)[rank]), model(x)
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.chunk(2)[rank].shape, kind
            assert torch.allclose(a, b.chunk(2)[rank], atol=1e-6), kind
        sum(t.square().sum() for t in got).backward()
        sum(t.square().sum() for t in expected).backward()
        for a, b in zip(parallel.parameters(), model.parameters(), strict=True):
            assert torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-5), kind


def test_outputs_that_are_views_have_local_shapes_and_the_models_values_and_gradients():
    launch(views, 2)


def padded(way):
    """A mean over targets of which one rank has more: loss in the graph, or DTensor outputs."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    y = torch.tensor([0, -100, -100, -100, 1, 2, 3, 0])
    inputs = (lambda: (x, y)) if way == "loss_fn" else (lambda: x)
    loss_fn = F.cross_entropy if way == "loss_fn" else None
    ap = AutoParallel(model, inputs, mesh, loss_fn=loss_fn).configure_compile("eager")
    with ap:
        plan = ap.optimize_placement()
        parallel = ap.apply_placement(plan, outputs="local" if loss_fn else "dtensor")
    own, target = x.chunk(2)[mesh.get_rank()], y.chunk(2)[mesh.get_rank()]
    expected = F.cross_entropy(model(x), y)
    expected.backward()
    if loss_fn:
        loss = parallel(own, target)
        assert torch.allclose(loss, expected)
    else:
        loss = F.cross_entropy(parallel(own), DTensor.from_local(target, mesh, (Shard(0),)))
    loss.backward()
    for a, b in zip(parallel.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-6)


@pytest.mark.parametrize("way", ["loss_fn", "dtensor"])
def test_a_padded_batch_gives_the_gradients_of_the_whole_batch(way):
    launch(padded, 2, way)


class Changes(torch.nn.Module):
    """Other outputs, and another parameter, in eval()."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = torch.nn.Linear(8, 8), torch.nn.Embedding(4, 8)

    def forward(self, x):
        if self.training:
            return self.linear(x), x.sum()
        return self.linear(x) + self.table.weight[0]


def test_another_mode_may_give_other_outputs_and_read_other_parameters():
    model = Changes()
    parallel = parallelized(model, lambda: torch.randn(4, 8))
    x = torch.randn(4, 8)
    assert torch.equal(parallel(x)[0], model(x)[0])
    assert torch.equal(parallel.eval()(x), model.eval()(x))


def test_a_plan_applied_after_a_change_of_mode_gives_a_module_in_the_mode_that_it_is_in():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.9))
    ap = AutoParallel(model, lambda: torch.randn(4, 8), fake_mesh((1,))).configure_compile("eager")
    with ap:
        plan = ap.optimize_placement()
    parallel = ap.apply_placement(plan)
    parallel_in_eval = ap.apply_placement(plan).eval()
    model.eval()
    late = ap.apply_placement(plan)
    x = torch.randn(4, 8)
    assert (parallel(x) == 0).float().mean() > 0.5
    for module in (late, parallel_in_eval):
        assert not module.training
        assert torch.equal(module(x), model(x))


def test_a_gradient_that_the_graph_does_not_have_is_refused():
    model = torch.nn.Linear(8, 8)
    model.bias.requires_grad_(False)
    parallel = parallelized(model, lambda: torch.randn(4, 8))
    with pytest.raises(UsageError, match="input input requires a gradient, and that of input_fn"):
        parallel(torch.randn(4, 8, requires_grad=True))
    parallel.bias.requires_grad_(True)
    with pytest.raises(UsageError, match="parameter bias requires a gradient now and did not"):
        parallel(torch.randn(4, 8))
    with torch.no_grad():
        parallel(torch.randn(4, 8))


class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2)
        return self.linear(x)


def inputs_in_other_forms():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model, x = Doubles(), torch.randn(4, 8)
    ap = AutoParallel(model, lambda: torch.randn(4, 8), mesh).configure_compile("eager")
    parallel = ap.parallelize(inputs=[(Shard(0),)], outputs=[(Shard(0),)])
    rank, expected = mesh.get_rank(), model(x.clone())
    own = x.chunk(2)[rank].clone()
    assert torch.allclose(parallel(own), expected.chunk(2)[rank], atol=1e-6)
    assert torch.equal(own, 2 * x.chunk(2)[rank])
    # a DTensor is brought to the placement that the graph takes
    for given in ((Replicate(),), (Shard(1),)):
        whole = DTensor.from_local(x.clone(), mesh, (Replicate(),)).redistribute(mesh, given)
        assert torch.allclose(parallel(whole), expected.chunk(2)[rank], atol=1e-6)


def test_an_input_is_changed_in_place_and_a_dtensor_is_moved_where_it_belongs():
    launch(inputs_in_other_forms, 2)


def test_a_module_added_later_takes_no_part():
    parallel = parallelized(torch.nn.Linear(8, 8), lambda: torch.randn(4, 8))
    x = torch.randn(4, 8)
    before = parallel(x)
    parallel.add_module("probe", torch.nn.Linear(2, 2))
    assert torch.equal(parallel(x), before)
