import contextlib
import threading
import warnings

import pytest
import torch
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils.checkpoint import checkpoint

from autop_ac import annotate
from autop_ac.annotate import REGION_PREFIX, ac_region, capturing, checkpoint_name
from autop_ac.capture.marks import NAMES_KEY, names_of, take_marks
from autop_ac.capture.trace import capture, request
from autop_ac.errors import CaptureError, ConfigError, HintError
from autop_ac.policies import MATMUL, every

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
            keys = sorted(int(k.removeprefix(REGION_PREFIX)) for k in custom if k != NAMES_KEY)
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


@pytest.mark.parametrize("raised", ["before", "inside", "after"])
def test_p14_an_exception_leaves_no_hint_to_the_next_model(raised):
    class Throws(Module):
        def forward(self, x):
            if raised == "before":
                raise RuntimeError
            with ac_region("outer"), ac_region("lost", save=[aten.mm]):
                x = checkpoint_name(self.a(x), "lost")
                if raised == "inside":
                    raise RuntimeError
            raise RuntimeError

    with pytest.raises(Exception):  # noqa: B017  Dynamo wraps what the model raises in its own
        joint(Throws(), torch.randn(2, 4))
    gm = joint(Looped(), torch.randn(2, 4))
    take_marks(gm)
    assert names(gm)["mm"] == [] and names(gm)["sin"] == ["step"]
    assert not [n for n in gm.graph.nodes if names_of(n)]
    assert torch.fx.traceback.get_current_meta() == {}


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


# ---- objects made outside of forward ---------------------------------------------------------


class Kept(Module):
    def __init__(self, **settings):
        super().__init__()
        self.region = ac_region("kept", **settings)
        self.entered_as_it_is = False

    def forward(self, x):
        for _ in range(2):
            if self.entered_as_it_is:
                with self.region:
                    x = self.a(x)
            else:
                with self.region():
                    x = self.a(x)
        return x.sin()


def test_a_region_of_init_is_called_where_it_is_entered():
    found = regions(joint(Kept(save=[every(2, aten.mm), "q"]), torch.randn(2, 4)))
    line = Kept.forward.__code__.co_firstlineno + 6
    assert found["mm"] == found["mm_1"]
    assert found["mm"][0]["save"] == ("aten.mm/2", "q")
    assert found["mm"][0]["source"] == f"{__file__}:{line}"
    gm = joint(Kept(), torch.randn(2, 4))
    keys = {n.name: tuple(n.meta["custom"]) for n in gm.graph.nodes if n.name in ("mm", "mm_1")}
    assert keys["mm"] != keys["mm_1"]


def test_a_region_of_init_in_eager_and_under_plain_compile():
    module, x = Kept(), torch.randn(2, 4)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    assert module.region() is module.region


def test_a_region_of_init_entered_as_it_is_names_the_line_and_the_remedy():
    module = Kept()
    module.entered_as_it_is = True
    line = Kept.forward.__code__.co_firstlineno + 3
    message = rf"(?s)an ac_region that was made outside of forward is entered at .*:{line}, .*`with self.region\(\):`"
    with pytest.raises(CaptureError, match=message):
        capture(request(module, lambda: torch.randn(2, 4)))


class Every(Module):
    outside = every(3, MATMUL)

    def forward(self, x):
        with ac_region("every", save=[every(2, aten.mm), self.outside], recompute=every(2, "q")):
            return self.a(x)


def test_every_is_traced_whether_made_inside_or_outside():
    (mark,) = regions(joint(Every(), torch.randn(2, 4)))["mm"]
    assert (mark["save"], mark["recompute"]) == (("aten.mm/2", "MATMUL/3"), ("q/2",))


# ---- checkpoint_name -------------------------------------------------------------------------


class NamesOf(Module):
    def __init__(self, name=lambda x, _: x):
        super().__init__()
        self.name = name

    def forward(self, x):
        x = self.name(x, "input")
        q = self.name(self.name(self.b(x).view(2, 2, 2), "view"), "q")
        left, right = self.name(q, "again").chunk(2)
        left = self.name(left, "item")
        y = self.name(self.a(left.reshape(1, 4)).sin(), "sin")
        y.mul_(2.0)
        return self.name(y, "out") + self.name(right, "right").sum()


def test_names_lie_on_the_values_and_the_graph_is_the_same_without():
    x = torch.randn(2, 4)
    torch.manual_seed(0)
    named = joint(NamesOf(checkpoint_name), x)
    assert any("autop_ac" in str(n.target) for n in named.graph.nodes)
    take_marks(named)
    torch.manual_seed(0)
    plain = joint(NamesOf(), x)
    assert str(named.graph) == str(plain.graph)
    found = {n.name: names_of(n) for n in named.graph.nodes if names_of(n)}
    assert found == {
        "primals_4": ("input",), "view": ("view", "q", "again"), "getitem": ("item",),
        "sin": ("sin",), "mul": ("out",), "getitem_1": ("right",),
    }  # fmt: skip
    assert [n.meta["custom"] for n in named.graph.nodes if n.name == "sin"] == [
        {NAMES_KEY: ("sin",)}
    ]


def test_a_name_is_left_on_one_value_of_those_that_share_an_annotation():
    graph, shared = torch.fx.Graph(), {"autop_ac_region_1": {}}
    x = graph.placeholder("x")
    sin = graph.call_function(aten.sin.default, (x,))
    cos = graph.call_function(aten.cos.default, (sin,))
    sin.meta["custom"] = cos.meta["custom"] = shared
    for name in ("q", "r", "q"):
        graph.call_function(torch.ops.autop_ac.mark.default, (sin, name))
    graph.output(cos)
    gm = torch.fx.GraphModule({}, graph)
    take_marks(gm)
    assert {n.name: names_of(n) for n in gm.graph.nodes if names_of(n)} == {
        "sin_default": ("q", "r")
    }
    assert shared == {"autop_ac_region_1": {}} and "autop_ac_region_1" in sin.meta["custom"]
    assert "mark" not in gm.code


def names_in_checkpoints():
    from torch.utils.checkpoint import checkpoint

    class Inside(Module):
        def part(self, x):
            return checkpoint_name(self.a(x).sin(), "q").exp()

        def forward(self, x):
            return checkpoint(self.part, checkpoint(self.part, x, use_reentrant=False),
                              use_reentrant=False)  # fmt: skip

    return Inside()


def test_names_in_a_checkpoint():
    gm = joint(names_in_checkpoints(), torch.randn(2, 4))
    take_marks(gm)
    found = [n.name for n in gm.graph.nodes if names_of(n)]
    assert found == ["sin", "sin_1"]
    assert not [n for n in gm.graph.nodes if "autop_ac" in str(n.target)]


def test_a_name_in_eager_is_the_value_itself():
    x = torch.randn(3, requires_grad=True)
    assert checkpoint_name(x, "x") is x
    y = x.sin()
    z = checkpoint_name(y, "y")
    assert z is y
    z.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("breaks", [False, True])
def test_names_do_nothing_under_plain_compile(breaks):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    def function(x):
        x = checkpoint_name(x.sin(), "q")
        if breaks:
            torch._dynamo.graph_break()
        return checkpoint_name(x, "r").cos()

    x = torch.randn(3)
    compiled = torch.compile(function, backend=backend, fullgraph=not breaks)
    torch.testing.assert_close(compiled(x), x.sin().cos())
    assert len(graphs) == 1 + breaks
    assert sum(n.op == "call_method" for gm in graphs for n in gm.graph.nodes) == 2
    assert not [n for gm in graphs for n in gm.graph.nodes if "autop_ac" in str(n.target)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [("MATMUL", "'MATMUL' is taken by a group"), ("a.b", "'a.b' is no name of a value")],
)
def test_bad_names_are_refused_in_eager_and_while_tracing(bad, message):
    class Bad(Module):
        def forward(self, x):
            return checkpoint_name(self.a(x), bad)

    with pytest.raises(ConfigError, match=message):
        Bad()(torch.randn(2, 4))
    with pytest.raises(ConfigError, match=message):
        joint(Bad(), torch.randn(2, 4))


def test_only_a_tensor_has_a_name():
    with pytest.raises(ConfigError, match="'q'.* got a tuple: name each tensor by itself"):
        checkpoint_name((torch.ones(1),), "q")


def test_p14_captures_in_threads_do_not_meet():
    class Labelled(Module):
        def __init__(self, label):
            super().__init__()
            self.label = label

        def forward(self, x):
            with ac_region(self.label):
                x = checkpoint_name(self.a(x), self.label)
            return x.sin()

    found = {}

    def run(label, barrier):
        barrier.wait()
        for _ in range(3):
            gm = capture(request(Labelled(label), lambda: torch.randn(2, 4))).module
            found.setdefault(label, []).append(
                (names(gm), {n.name: names_of(n) for n in gm.graph.nodes if names_of(n)})
            )

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(f"t{i}", barrier)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        label = f"t{i}"
        assert found[label] == [({"t": [label], "mm": [label], "sin": []}, {"mm": (label,)})] * 3


class Empty(Module):
    def forward(self, x):
        with ac_region():
            pass
        with ac_region("shape", save=MATMUL):
            size = x.shape[0]
        with ac_region("name"):
            x = checkpoint_name(x, "x")
        for layer in (None, self.a):
            with ac_region("sometimes empty"):
                if layer is not None:
                    x = layer(x)
        with ac_region("outer"), ac_region("inner"):
            x = x.sin()
        with ac_region("checkpointed"):
            x = checkpoint(torch.sin, x, use_reentrant=False)
        return self.nothing(x) * size

    @ac_region("decorated")
    def nothing(self, x):
        return x


def test_a_region_that_holds_no_operation_is_told_of_by_its_line():
    made = request(Empty(), lambda: torch.randn(2, 4))
    with pytest.warns(UserWarning, match="holds no operation") as told:
        capture(made)
    line = Empty.forward.__code__.co_firstlineno + 1
    said = [str(w.message) for w in told]
    assert len(said) == 4 and f"ac_region at {__file__}:{line} holds" in said[0]
    for name, message in zip(("shape", "name", "decorated"), said[1:], strict=True):
        assert f'ac_region "{name}" at' in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(made, [False] * 3)  # of another mode nothing is told
