"""``dynamic=True``: inputs of other sizes, between calls, give the single-device gradients."""

import functools
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from autop_ac import (
    AutoParallel,
    ForwardInputs,
    InfeasibleError,
    UsageError,
    ac_region,
    auto_parallel,
    backend,
    fake_mesh,
    launch,
)
from autop_ac.runtime import parallel as parallel_module
from autop_ac.runtime.sizes import divided, local_part, parts, whole_shape
from tests.gpt import GPT, GPTConfig, HintedGPT, mean_loss

CONFIG = GPTConfig(vocab_size=32, dim=16, heads=2, layers=1, context=8)


def tokens(batch, length=8):
    return torch.randint(0, 32, (batch, length))


def own(x, mesh):
    """This rank's part, as torch.chunk cuts it; nothing where there are more ranks than rows."""
    chunks = x.chunk(mesh.size())
    rank = mesh.get_rank()
    return chunks[rank] if rank < len(chunks) else x[:0]


def assert_gradients_equal(model, parallel, what):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for (name, expected), got in zip(model.named_parameters(), parallel.parameters(), strict=True):
        bound = 1e-5 * expected.grad.norm() + 1e-7 * norm
        assert (got.grad.full_tensor() - expected.grad).norm() <= bound, (what, name)
    model.zero_grad()
    parallel.zero_grad()


class Small(torch.nn.Module):
    """For Inductor, which takes long."""

    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, x):
        return torch.sin(self.table(x))


def with_loss_in_graph(mesh, model, sizes, way="eager", **ac):
    """Sizes up and down, some that do not divide, one after the other and before one backward."""
    torch.manual_seed(0)
    ap = AutoParallel(model, lambda: (tokens(8), tokens(8)), mesh, loss_fn=mean_loss, dynamic=True)
    ap.configure_comm(prefetch="memory_budget" not in ac)  # whose room is most of so small a model
    with ap.configure_ac(**ac).configure_compile(way):
        ap.add_parameter_memory_constraint()
        parallel = ap.apply_placement(ap.optimize_placement())
    for size in sizes:
        x, y = tokens(size), tokens(size)
        loss = parallel(own(x, mesh), own(y, mesh))
        expected = mean_loss(model(x), y)
        assert abs(loss.item() - expected.item()) < 1e-5, size
        loss.backward()
        expected.backward()
        assert_gradients_equal(model, parallel, size)
    several = [(tokens(n), tokens(n)) for n in sizes]
    losses = [parallel(own(x, mesh), own(y, mesh)) for x, y in several]
    sum(losses).backward()
    sum(mean_loss(model(x), y) for x, y in several).backward()
    assert_gradients_equal(model, parallel, "several")


class Normed(torch.nn.Module):
    """A dict batch and keywords, buffers that change, outputs of several kinds."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, batch, *, scale=None):
        h = self.norm(self.inner(batch["x"]))
        with ac_region():
            h = F.silu(h) * scale
        return {"logits": self.last(h), "mean": (batch["x"] * 2,)}


def with_state_and_outputs(mesh, outputs):
    """Batch norm statistics follow every size, train and eval; gradients of inputs too."""
    torch.manual_seed(0)
    model = Normed()

    def inputs(n=8):
        x = torch.randn(n, 6, requires_grad=True)
        return ForwardInputs(({"x": x},), {"scale": torch.randn(n, 1)})

    ap = AutoParallel(model, inputs, mesh, dynamic=True).configure_compile("eager")
    with ap:
        ap.add_parameter_memory_constraint()
        parallel = ap.apply_placement(ap.optimize_placement(), outputs=outputs)
    for size in (8, 6, 7) if outputs == "local" else (7,):
        made = inputs(size)
        x, scale = made.args[0]["x"], made.kwargs["scale"]
        for training in (True, False):
            model.train(training)
            parallel.train(training)
            mine = own(x.detach(), mesh).requires_grad_()
            got = parallel({"x": mine}, scale=own(scale, mesh))
            expected = model({"x": x}, scale=scale)
            whole = expected["logits"]
            if outputs == "dtensor":
                assert got["logits"].placements == (Shard(0),)
                assert torch.allclose(got["logits"].full_tensor(), whole, atol=1e-5), size
                got["logits"].square().sum().backward()
            else:
                assert torch.allclose(got["logits"], own(whole, mesh), atol=1e-5), size
                assert got["mean"][0].shape == mine.shape
                (got["logits"].square().sum() + got["mean"][0].sum()).backward()
            wanted = whole.square().sum()
            (wanted if outputs == "dtensor" else wanted + expected["mean"][0].sum()).backward()
            assert torch.allclose(mine.grad, own(x.grad, mesh), rtol=1e-4, atol=1e-5), size
            x.grad = None
            assert_gradients_equal(model, parallel, (size, training))
    for (name, a), b in zip(model.named_buffers(), parallel.buffers(), strict=True):
        assert torch.allclose(a, b.full_tensor(), atol=1e-5), name
    with torch.no_grad():  # a size that is met without gradients first
        x, scale = torch.randn(10, 6), torch.randn(10, 1)
        got = parallel({"x": own(x, mesh)}, scale=own(scale, mesh))["logits"]
        got = got.full_tensor() if outputs == "dtensor" else got
        whole = model({"x": x}, scale=scale)["logits"]
        assert torch.allclose(got, whole if outputs == "dtensor" else own(whole, mesh), atol=1e-5)


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        with ac_region():
            return F.dropout(torch.sigmoid(x * self.weight), 0.5)


def with_dropout(mesh):
    """The mask of backward is that of forward, of each of several forwards; ranks draw their own."""
    torch.manual_seed(3)
    ap = AutoParallel(Masked(), lambda: torch.ones(8, 64), mesh, dynamic=True)
    with ap.configure_compile("eager").configure_ac(stage_size=None):
        ap.add_parameter_memory_constraint()
        parallel = ap.apply_placement(ap.optimize_placement())
    outs = [parallel(own(torch.ones(n, 64), mesh)) for n in (8, 4, 7)]
    sum(o.sum() for o in outs).backward()
    kept = sum((o != 0).float().sum(0) for o in outs)
    torch.distributed.all_reduce(kept)
    slope = 2 * torch.sigmoid(torch.tensor(1.0)) * (1 - torch.sigmoid(torch.tensor(1.0)))
    assert torch.allclose(parallel.weight.grad.full_tensor(), kept * slope, 1e-4)
    both = [torch.empty_like(outs[0]) for _ in range(2)]
    torch.distributed.all_gather(both, outs[0].detach())
    assert not torch.equal(*both)


class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.mul_(2))


def with_parts_that_do_not_fit(mesh):
    """What ranks hold together is told on all of them, and none waits for another."""
    ap = AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(8, 4), mesh, dynamic=True)
    parallel = ap.configure_compile("eager").parallelize()
    rank = mesh.get_rank()
    with pytest.raises(UsageError, match=r"local sizes \[2, 3\] in dim 0.* are \[3, 2\]"):
        parallel(torch.randn(2 + rank, 4))
    with pytest.raises(UsageError, match=r"local sizes \[4, 5\] in dim 1"):
        parallel(torch.randn(2, 4 + rank))
    with pytest.raises(UsageError, match=r"tensor of 2 dims, and on ranks at \[\(1,\)\]"):
        parallel(torch.randn(2, 4) if rank == 0 else torch.randn(4))
    changed = AutoParallel(Doubles(), lambda: torch.randn(8, 4), mesh, dynamic=True)
    changed = changed.configure_compile("eager").parallelize()
    x = torch.ones(2, 4)
    changed(x)
    assert torch.equal(x, torch.full((2, 4), 2.0))
    with pytest.raises(UsageError, match="forward changes input x in place"):
        changed(torch.ones(2 - rank, 4))
    # a DTensor tells its own size, however it is placed
    x = torch.arange(24.0).reshape(6, 4)
    out = parallel(DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)]))
    assert torch.allclose(out, parallel(x.chunk(2)[rank]))


def every_case():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with_loss_in_graph(mesh, HintedGPT(CONFIG), (8, 4, 1), stage_size=None)
        with_loss_in_graph(mesh, GPT(CONFIG), (4, 3), memory_budget=0.9)
        with_loss_in_graph(mesh, Small(CONFIG), (4, 3), "inductor")
        with_state_and_outputs(mesh, "local")
        with_state_and_outputs(mesh, "dtensor")
        with_dropout(mesh)
        with_parts_that_do_not_fit(mesh)


def test_gradients_of_every_size_are_the_single_device_ones():
    launch(every_case, 2)


def linear(dynamic=True, **settings):
    model = torch.nn.Linear(4, 4)
    ap = AutoParallel(model, lambda: torch.randn(8, 4), fake_mesh(1), dynamic=dynamic)
    return model, ap.configure_ac(**settings).configure_compile("eager").parallelize()


def test_without_dynamic_another_size_is_refused_with_the_remedy():
    _, parallel = linear(dynamic=False)
    with pytest.raises(UsageError, match=r"local shape \(6, 4\).*dynamic=True"):
        parallel(torch.randn(6, 4))


def test_each_size_is_traced_once_a_bound_holds_and_a_warning_tells(monkeypatch):
    model, parallel = linear()
    monkeypatch.setattr(parallel_module, "_MANY", 2)
    monkeypatch.setattr(parallel_module, "_KEPT", 3)
    made = []
    real = parallel_module.Runner.__call__
    runners = functools.partialmethod(lambda self, m, x: made.append(self) or real(self, m, x))
    monkeypatch.setattr(parallel_module.Runner, "__call__", runners)

    def used(size):
        x = torch.randn(size, 4)
        assert torch.allclose(parallel(x), model(x), atol=1e-6)
        return made[-1]

    first, second = used(8), used(2)
    with pytest.warns(UserWarning, match="inputs of 3 different sizes.*Pad to a few sizes"):
        third = used(3)
    assert used(8) is first
    assert used(2) is second
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used(5)  # told once; the third has not been called for longest
    assert used(3) is not third
    assert used(2) is second


def test_a_budget_that_another_size_cannot_meet_says_for_which():
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])

        def forward(self, x):
            return self.layers(x).square().sum()

    ap = AutoParallel(Deep(), lambda: torch.randn(8, 64), fake_mesh(1), dynamic=True)
    parallel = ap.configure_ac(memory_budget="256 KiB").configure_compile("eager").parallelize()
    assert ap.ac_report.inputs == ("x (8, 64)",)
    assert str(ap.ac_report).splitlines()[0].endswith("inputs x (8, 64)")
    parallel(torch.randn(8, 64)).backward()
    with pytest.raises(InfeasibleError) as caught:
        parallel(torch.randn(4096, 64))
    assert "global shapes [(4096, 64)]" in caught.value.__notes__[0]


def test_auto_parallel_takes_it_and_a_graph_of_other_code_takes_a_size_that_was_called():
    model = torch.nn.Linear(4, 4)
    parallel = auto_parallel(model, fake_mesh(1), torch.randn(8, 4), dynamic=True)
    x = torch.randn(6, 4)
    compiled = torch.compile(parallel, backend=backend(compile="eager"), fullgraph=True)
    with pytest.raises(Exception, match="not with inputs of these sizes"):
        compiled(x)
    assert torch.allclose(parallel(x), model(x), atol=1e-6)
    for size in (6, 8):
        x = torch.randn(size, 4)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)


def test_parts_and_the_whole_that_they_make():
    both = (Shard(0), Shard(0))
    for size in range(12):
        t = torch.empty(size, 2)
        chunks = [len(c) for c in t.chunk(3)] if size else []
        assert parts(size, [3]) == chunks + [0] * (3 - len(chunks))
        shapes = {
            (a, b): local_part((size, 2), both, (2, 3), (a, b)) for a in (0, 1) for b in range(3)
        }
        assert whole_shape("x", shapes, both, (2, 3)) == (size, 2)
        assert sum(s[0] for s in shapes.values()) == size
    assert divided((6, 2), both, (2, 2)) == (Shard(0), torch.distributed.tensor.Replicate())
