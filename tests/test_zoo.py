"""Models of other kinds than a GPT train on four processes as on one; each option is right on numbers."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from autop_ac import fake_mesh, launch
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import find_device
from autop_ac.sharding.options import OptionFinder
from tests.benchmarks.models import compare_all, is_equal
from tests.test_sharding_search import Recorder, check_option
from tests.zoo import MODELS


@pytest.mark.parametrize(
    "cases",
    [
        # a batch norm over the whole batch; convolutions, upsampling, norms of groups, cross attention
        [("resnet", (4,), "plain"), ("unet", (2, 2), "data")],
    ],
    ids=["resnet and unet"],
)
def test_models_train_as_on_one_process(cases):
    for results in launch(compare_all, 4, cases):
        for case, result in zip(cases, results, strict=True):
            assert is_equal(result), (case, result)
            assert not result["warnings"], (case, result)
            assert result["moves"] > 0, case


class Rest(torch.nn.Module):
    """Operators of ours that the models have not: indices in other places, planes, scans."""

    def __init__(self):
        super().__init__()
        self.grouped = torch.nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.weight = torch.nn.Parameter(torch.randn(4, 8))
        self.scale = torch.nn.Parameter(torch.rand(4, 1))

    def forward(self, x, rows):
        aten = torch.ops.aten
        y = torch.nn.functional.pad(self.grouped(x), (1, 1, 1, 1), mode="reflect")
        y = torch.nn.functional.adaptive_avg_pool2d(y, 4)
        normed, _ = aten._weight_norm_interface(self.weight, self.scale, 0)
        a = aten._unsafe_index(y, [None, rows, None, None])
        b = aten._unsafe_index(y, [rows[:, None], None, rows])
        put = aten._unsafe_index_put(y, [rows, rows], y[:4, 0] * 2, True)
        put = aten._unsafe_index_put(put, [None, rows[:1]], y[:, :1] * 2, True)  # one place alone
        scan = y.cumsum(-2) + y.cumsum(0)
        kept = y.scatter_reduce(2, torch.zeros_like(y, dtype=torch.long), y, "sum")
        return a.sum((1, 2, 3)), b.mean((1, 2)), put, scan, kept @ normed.sum(0)[:4], torch.zeros(8)


def numbers(model, inputs):
    """The joint graph and each operator of it on real tensors."""
    joint = capture(request(model, lambda: inputs))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given, real = iter(inputs), []
    for node in joint.module.graph.find_nodes(op="placeholder"):
        port, value = joint.placeholders[node.name], node.meta["val"]
        if port.kind in ("parameter", "buffer"):
            real.append(held[port.name].detach())
        else:
            real.append(next(given) if port.kind == "input" else torch.randn(value.shape))
    recorder = Recorder(joint.module)
    recorder.run(*real)
    return joint, recorder.seen


@pytest.mark.filterwarnings("ignore:no sharding rule:UserWarning")
@pytest.mark.parametrize("name", ["state_space", "unet", "resnet", "rest"])
def test_options_of_each_operator_are_right_on_numbers(name):
    torch.manual_seed(0)
    if name == "rest":
        model, inputs = Rest(), (torch.randn(8, 8, 8, 8), torch.tensor([0, 2, 2, 1]))
    else:
        make, made = MODELS[name]
        model, inputs = make(), made()
    _, seen = numbers(model, inputs)
    finder, checked, done = OptionFinder(fake_mesh((2,)), find_device("H100")), set(), set()
    for node, (args, kwargs, result) in seen.items():
        found = finder.options(node)
        if id(found) in done or node.meta.get("val") is None:
            continue
        done.add(id(found))
        for option in found:
            tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            placed = [p for p in option.inputs if p is not None]
            if any(p[0].is_partial() for t, p in zip(tensors, placed) if not t.is_floating_point()):
                continue
            check_option(node, args, kwargs, result, option)
            cut = any(p is not None and not p[0].is_replicate() for p in option.outputs)
            checked.add((str(node.target), cut))
    lacking = {op for op, _ in checked} - {op for op, cut in checked if cut}
    known = {"aten.arange.default", "aten.tril.default", "aten.triu.default"}
    assert lacking <= known | {"aten.arange.start", "aten.arange.start_step"}, lacking


def test_a_scan_takes_no_parts_along_its_dim():
    class Scan(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (x * self.scale).cumsum(-1)

    joint = capture(request(Scan(), lambda: torch.randn(8, 8)))
    finder = OptionFinder(fake_mesh((2,)), find_device("H100"))
    nodes = [n for n in joint.module.graph.nodes if "cumsum" in str(n.target)]
    assert nodes
    for node in nodes:
        given = {o.outputs[0] for o in finder.options(node)}
        assert given == {(Replicate(),), (Shard(0),)}
