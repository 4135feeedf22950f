import contextlib
import threading

import pytest
import torch
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from autop_ac import annotate
from autop_ac.annotate import REGION_PREFIX, ac_region, capturing
from autop_ac.errors import ConfigError, HintError
from autop_ac.policies import MATMUL

aten = torch.ops.aten


def joint(model, *args):
    """The joint graph of `model`, as our capture makes it."""
    with capturing():
        graph = _dynamo_graph_capture_for_export(model)(*args)
    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, graph, args).graph_module


def regions(gm):
    """By forward node, its regions from outside in."""
    found = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward":
            custom = node.meta.get("custom", {})
            keys = sorted(int(k.removeprefix(REGION_PREFIX)) for k in custom)
            found[node.name] = [custom[f"{REGION_PREFIX}{k}"] for k in keys]
    return found


def names(gm):
    return {node: [r["name"] for r in rs] for node, rs in regions(gm).items()}


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4)


class Plain(Module):
    def forward(self, x):
        with ac_region("a", save=[aten.mm], recompute="aten.relu", prefer=True):
            x = self.a(x).relu()
        with ac_region():
            x = x.sin()
        return self.b(x)


def test_a_region_marks_its_forward_nodes_with_plain_values():
    found = regions(joint(Plain(), torch.randn(2, 4)))
    (mark,) = found["mm"]
    line = Plain.forward.__code__.co_firstlineno + 1
    assert mark == {
        "name": "a", "save": ("aten.mm",), "recompute": ("aten.relu",), "otherwise": "recompute",
        "prefer": True, "source": f"{__file__}:{line}",
    }  # fmt: skip
    assert found["relu"] == [mark]
    assert [r["name"] for r in found["sin"]] == [""]
    assert found["addmm"] == []


class Nested(Module):
    def forward(self, x):
        with ac_region("outer"):
            x = self.a(x)
            with ac_region("inner", save=MATMUL), ac_region("innermost"):
                x = x.sin()
            return x.cos()


def test_nested_regions_both_remain_and_the_innermost_is_last():
    found = names(joint(Nested(), torch.randn(2, 4)))
    assert found["mm"] == found["cos"] == ["outer"]
    assert found["sin"] == ["outer", "inner", "innermost"]


class Looped(Module):
    def forward(self, x):
        for _ in range(3):
            with ac_region("step"):
                x = x.sin()
        return self.a(x)


def test_each_entry_of_a_loop_has_a_key_of_its_own():
    gm = joint(Looped(), torch.randn(2, 4))
    keys = [tuple(n.meta["custom"]) for n in gm.graph.nodes if n.name.startswith("sin")][:3]
    assert len(set(keys)) == 3
    again = joint(Looped(), torch.randn(2, 4))
    assert [tuple(n.meta["custom"]) for n in again.graph.nodes if n.name.startswith("sin")][
        :3
    ] == keys


class Decorated(Module):
    @ac_region("method", save=[aten.mm])
    def part(self, x, *, scale=1.0):
        return self.a(x) * scale

    @ac_region("forward", recompute=MATMUL)
    def forward(self, x):
        return self.part(x, scale=3.0).sin()


@ac_region("function", otherwise="save")
def function(x):
    return x.exp()


class Calls(Decorated):
    def forward(self, x):
        return function(super().forward(x))


def test_decorators_on_a_function_a_method_and_forward():
    found = regions(joint(Calls(), torch.randn(2, 4)))
    assert [r["name"] for r in found["mm"]] == ["forward", "method"]
    assert [r["name"] for r in found["sin"]] == ["forward"]
    assert [r["otherwise"] for r in found["exp"]] == ["save"]
    assert found["mm"][0]["otherwise"] == "auto"
    assert found["mm"][1]["source"].startswith(f"{__file__}:")
    assert Decorated.part.__name__ == "part"


class Raising(Module):
    def forward(self, x):
        with contextlib.suppress(ValueError), ac_region("raises"):
            x = self.a(x)
        try:
            with ac_region("left"):
                x = x.sin()
                raise ValueError
        except ValueError:
            x = x.cos()
        return x


def test_a_region_that_is_left_by_an_exception_ends():
    found = names(joint(Raising(), torch.randn(2, 4)))
    assert (found["mm"], found["sin"], found["cos"]) == (["raises"], ["left"], [])


class Fails(Module):
    def forward(self, x):
        with ac_region("lost"):
            raise RuntimeError("from the model")


def test_p14_failed_captures_and_other_threads_leave_nothing_behind():
    with contextlib.suppress(Exception):
        joint(Fails(), torch.randn(2, 4))
    assert annotate._uids.get() is None
    assert names(joint(Looped(), torch.randn(2, 4)))["mm"] == []
    with pytest.raises(ZeroDivisionError), capturing():
        raise ZeroDivisionError
    assert annotate._uids.get() is None
    seen = []
    with capturing():
        thread = threading.Thread(target=lambda: seen.append(annotate._uids.get()))
        thread.start()
        thread.join()
    assert seen == [None]


class Contradicts(Module):
    def forward(self, x):
        with ac_region("both", save=[MATMUL], recompute=[aten.mm]):
            return self.a(x)


def test_contradictions_name_the_line_while_tracing_and_in_eager():
    line = Contradicts.forward.__code__.co_firstlineno + 1
    where = rf"test_annotate.py:{line} contradicts itself: save=MATMUL and recompute=aten.mm"
    with pytest.raises(HintError, match=where):
        joint(Contradicts(), torch.randn(2, 4))
    with pytest.raises(HintError, match=where):
        Contradicts()(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"otherwise": "keep"}, r"otherwise='keep'; allowed are \"recompute\", \"save\", \"auto\""),
        ({"prefer": 1}, "prefer=1; allowed are True and False"),
        ({"save": "aten.mmm"}, "test_annotate.py:.*no operator 'aten.mmm'.*'aten.mm'"),
        ({"name": 3}, "the name is 3"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ac_region(**settings)


def test_a_bare_decorator_and_a_decorated_class_are_refused():
    with pytest.raises(ConfigError, match=r"write @ac_region\(\) with parentheses"):
        ac_region(lambda x: x)
    with pytest.raises(HintError, match="decorate a function or a method"):
        ac_region()(Module)


@pytest.mark.parametrize("model", [Plain, Nested, Looped, Calls])
def test_harmless_under_plain_compile(model):
    module, x = model(), torch.randn(2, 4)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    assert not [n for gm in graphs for n in gm.graph.nodes if n.meta.get("custom")]


def test_a_graph_break_in_a_region_is_harmless_under_plain_compile():
    def broken(x):
        with ac_region("broken"):
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(broken, backend="eager")(x), x.sin().cos())


def saved_by(fn, x):
    """Results of the calls to mm and sin, forward and backward, of ``fn(x)``."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.randn(4, 4, requires_grad=True)
    with Count():
        out = fn(x, weight)
        before = len(calls)
        out.sum().backward()
    return [c for c in calls[:before]], [c for c in calls[before:]], weight.grad, weight


def body(x, w):
    return (x @ w).sin().exp()


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({}, {"mm", "sin", "exp"}),
        ({"save": [aten.mm]}, {"sin", "exp"}),
        ({"save": MATMUL, "prefer": True}, {"sin", "exp"}),
        ({"recompute": [aten.sin]}, {"sin"}),
        ({"recompute": [aten.sin], "otherwise": "recompute"}, {"mm", "sin", "exp"}),
        ({"otherwise": "save"}, set()),
    ],
)
def test_the_decorator_checkpoints_in_eager(settings, again):
    x = torch.randn(2, 4)
    forward, backward, grad, weight = saved_by(ac_region(**settings)(body), x)
    assert {"aten.mm.default", "aten.sin.default", "aten.exp.default"} <= set(forward)
    plain = saved_by(body, x)[1]
    for op in ("mm", "sin", "exp"):
        extra = backward.count(f"aten.{op}.default") - plain.count(f"aten.{op}.default")
        # early stop leaves the last operator out where nothing of it is needed
        assert extra == 0 if op not in again else extra in (0, 1), op
    recomputed = sum(backward.count(f"aten.{op}.default") for op in ("mm", "sin", "exp"))
    unchanged = sum(plain.count(f"aten.{op}.default") for op in ("mm", "sin", "exp"))
    assert (recomputed > unchanged) == bool(again)
    expected = torch.autograd.grad(body(x, weight).sum(), weight)[0]
    torch.testing.assert_close(grad, expected)


def test_the_context_manager_does_nothing_in_eager():
    def managed(x, w):
        with ac_region("region"):
            return body(x, w)

    x = torch.randn(2, 4)
    assert saved_by(managed, x)[1] == saved_by(body, x)[1]
