"""`torch.compile` around a parallel module: what runs, and what is kept, is ours all the same."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import autop_ac
from autop_ac import AutoParallel, fake_mesh
from tests.gpt import HintedGPT


@dataclass
class Out:
    y: torch.Tensor
    more: dict


class Net(torch.nn.Module):
    def __init__(self, kind="tensor"):
        super().__init__()
        self.kind = kind
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.dropout(self.two(torch.relu(self.one(x))))
        if self.kind == "dict":
            return {"y": y, "rest": (y.sin(), x.argmax(-1))}
        return Out(y, {"cos": y.cos()}) if self.kind == "dataclass" else y


def tensor_of(out):
    return out.y if isinstance(out, Out) else out["y"] if isinstance(out, dict) else out


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parallelized(model, inputs=lambda: torch.randn(4, 8), outputs="local"):
    ap = AutoParallel(model.eval(), inputs, fake_mesh(2)).configure_compile("eager")
    with ap.configure_ac(stage_size=None):
        ap.add_input_constraints([(Shard(0),)])
        ap.add_parameter_memory_constraint()
        return ap.apply_placement(ap.optimize_placement(), outputs=outputs)


def kept(module, x):
    """The output, and the shapes of what forward keeps besides the parameters' own shards."""
    shapes, own = [], {p.to_local().data_ptr() for p in module.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return module(x), shapes


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass"])
def test_under_our_backend_the_call_is_one_node_that_keeps_what_it_keeps_alone(kind, fullgraph):
    parallel = parallelized(Net(kind))
    ac = autop_ac.backend(compile="eager")
    compiled = torch.compile(parallel, backend=ac, fullgraph=fullgraph)
    x = torch.randn(2, 8)
    (expected, alone), (got, inside) = kept(parallel, x), kept(compiled, x)
    assert type(got) is type(expected)
    assert torch.equal(tensor_of(got), tensor_of(expected))
    assert inside == alone
    assert not ac.reports, "the graph was planned a second time"
    tensor_of(expected).sum().backward()
    gradients = [p.grad.to_local().clone() for p in parallel.parameters()]
    parallel.zero_grad()
    tensor_of(got).sum().backward()
    for parameter, gradient in zip(parallel.parameters(), gradients):
        assert torch.equal(parameter.grad.to_local(), gradient)


@pytest.mark.parametrize("other", ["inductor", "aot_eager", "eager"])
def test_under_other_backends_it_runs_as_it_is_or_is_refused(other):
    parallel = parallelized(Net())
    x = torch.randn(2, 8)
    expected, alone = kept(parallel, x)
    got, inside = kept(torch.compile(parallel, backend=other), x)
    assert torch.equal(got, expected) and inside == alone
    got.sum().backward()
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="is compiled already.*autop_ac.backend"
    ):
        torch.compile(parallel, backend=other, fullgraph=True)(x)


def test_no_gathered_weight_is_kept_for_a_model_with_hints():
    parallel = parallelized(HintedGPT(), lambda: torch.randint(64, (10, 16)))
    x = torch.randint(64, (5, 16))
    compiled = torch.compile(parallel, backend=autop_ac.backend(), fullgraph=True)
    (_, alone), (_, inside) = kept(parallel, x), kept(compiled, x)
    assert inside == alone
    weights = [p for p in parallel.parameters() if p.dim() == 2 and p.to_local().shape != p.shape]
    assert weights
    whole = {tuple(p.shape) for p in weights} | {tuple(p.shape[::-1]) for p in weights}
    assert not whole & set(inside)


def test_a_copy_runs_with_its_own_weights_and_code_around_it_is_in_the_graph():
    parallel = parallelized(Net())
    ac = autop_ac.backend(compile="eager")
    x = torch.randn(2, 8)
    first = torch.compile(parallel, backend=ac, fullgraph=True)(x)
    twin = copy.deepcopy(parallel)
    twin.load_state_dict({n: torch.zeros(t.shape) for n, t in twin.state_dict().items()})
    assert torch.equal(torch.compile(twin, backend=ac, fullgraph=True)(x), torch.zeros_like(first))
    around = torch.compile(lambda x: parallel(2 * x).sin(), backend=ac, fullgraph=True)
    torch.testing.assert_close(around(x), parallel(2 * x).sin())
    around(x).sum().backward()
    assert parallel.one.weight.grad is not None


def test_train_and_eval_are_followed_and_a_trace_in_a_mode_that_was_not_run_is_refused():
    parallel = parallelized(Net())
    x = torch.randn(2, 8)
    compiled = torch.compile(parallel, backend=autop_ac.backend(compile="eager"), fullgraph=True)
    assert not (compiled(x) == 0).any()
    assert (compiled.train()(x) == 0).any()
    other = parallelized(Net()).train()
    with pytest.raises(Exception, match="was not called in this combination of train"):
        torch.compile(other, backend=autop_ac.backend(compile="eager"), fullgraph=True)(x)


def test_dtensor_outputs_are_dtensors_in_the_graph_too():
    parallel = parallelized(Net(), outputs="dtensor")
    compiled = torch.compile(parallel, backend=autop_ac.backend(compile="eager"), fullgraph=True)
    x = torch.randn(2, 8)
    out = compiled(x)
    assert isinstance(out, DTensor) and out.shape == (4, 8)
    assert torch.equal(out.to_local(), parallel(x).to_local())


def test_a_checkpoint_around_it_runs_as_in_eager():
    parallel = parallelized(Net(), lambda: torch.randn(4, 8, requires_grad=True))
    scale, x = torch.nn.Parameter(torch.full((8,), 2.0)), torch.randn(2, 8)

    def forward(x):
        return checkpoint(lambda z: parallel(z * scale).sin(), x, use_reentrant=False)

    found = []
    for run in (forward, torch.compile(forward, backend=autop_ac.backend(), fullgraph=True)):
        out = run(x)
        wanted = [scale, *parallel.parameters()]
        found.append((out, *torch.autograd.grad(out.sum(), wanted)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def named(y):
    return autop_ac.checkpoint_name(y.sin(), "tail").cos()


@autop_ac.ac_region()
def in_region(y):
    return y.sin().cos()


@pytest.mark.parametrize("around", [named, in_region])
def test_hints_beside_it_are_not_dropped_in_silence(around):
    parallel, x = parallelized(Net()), torch.randn(2, 8)
    compiled = torch.compile(lambda x: around(parallel(x)), backend=autop_ac.backend())
    with pytest.warns(UserWarning, match="the hints beside that call are not read"):
        got = compiled(x)
    torch.testing.assert_close(got, parallel(x).sin().cos())


def test_settings_of_the_backend_that_nothing_reads_are_told():
    parallel, x = parallelized(Net()), torch.randn(2, 8)
    ours = autop_ac.backend(stage_size="1 MiB", compile="eager")
    with pytest.warns(UserWarning, match="stage_size='1 MiB' of the backend takes no part in it"):
        got = torch.compile(lambda x: parallel(x) + 1, backend=ours)(x)
    torch.testing.assert_close(got, parallel(x) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(lambda x: parallel(x) + 2, backend=autop_ac.backend(compile="eager"))(x)
