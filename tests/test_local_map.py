"""`local_map` in a model: what is written by hand for one device trains as one process does."""

from functools import partial

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.utils.checkpoint import checkpoint

from autop_ac import AutoParallel, CaptureError, ConfigError, ac_region, fake_mesh, launch
from autop_ac.capture.trace import capture, request
from autop_ac.graph.devices import Topology, find_device
from autop_ac.sharding.options import OptionFinder
from tests.beside import assert_trains_alike, each
from tests.zoo import DispatchedExperts, Experts

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
aten = torch.ops.aten


class Base(torch.nn.Module):
    """A part written by hand between two layers; `whole` is the same on one process."""

    inputs, outputs = ((S1,), (S0,), (R,)), ((R,),)
    gradients = None

    def __init__(self, mesh=None):
        super().__init__()
        self.mesh = mesh
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.weight = torch.nn.Parameter(torch.randn(32, 16) / 6)
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mesh is None:
            y = self.whole(h, self.weight, self.scale)
        else:
            written = local_map(
                self.local, out_placements=self.outputs, in_placements=self.inputs,
                in_grad_placements=self.gradients, device_mesh=self.mesh, redistribute_inputs=True,
            )  # fmt: skip
            y = written(h, self.weight, self.scale)
        return self.down(y + x)

    def whole(self, h, weight, scale):
        y = h @ weight
        return y.tanh() * scale + y

    def sum(self, x):
        return funcol.all_reduce(x, "sum", self.mesh.get_group())


class Summed(Base):
    """A product cut along what is summed, added up, and used with a replicated tensor."""

    def local(self, h, weight, scale):
        return self.whole(self.sum(h @ weight), torch.eye(16, dtype=h.dtype), scale)


class Checkpointed(Summed):
    """Inside of a checkpoint, which reads what the call reads too."""

    def forward(self, x):
        again = lambda x: super(Checkpointed, self).forward(x) * self.scale + x  # noqa: E731
        return checkpoint(again, x, use_reentrant=False)


class LeftOver(Base):
    """The sum is left to what comes after."""

    outputs = ((P,),)

    def local(self, h, weight, scale):
        return (h @ weight) * scale

    def whole(self, h, weight, scale):
        return (h @ weight) * scale


class Mean(LeftOver):
    """What is left is a mean: of each device's own product, twice as large."""

    outputs = ((Partial("avg"),),)

    def local(self, h, weight, scale):
        return (h @ weight) * scale * 2


class HandedOn(LeftOver):
    """What is left is added up by a second call, which reads it as it is."""

    factor = 1

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mesh is None:
            return self.down(self.whole(h, self.weight, self.scale) + x)
        parts = local_map(self.local, self.outputs, self.inputs, device_mesh=self.mesh)
        added_up = local_map(self.rest, ((R,),), self.outputs, device_mesh=self.mesh)
        return self.down(added_up(parts(h, self.weight, self.scale)) + x)

    def rest(self, y):
        return self.sum(y) / self.factor


class MeanHandedOn(HandedOn):
    outputs, factor = ((Partial("avg"),),), 2
    local = Mean.local


class Gathered(Base):
    """Rows in parts; the weight, in parts too, is gathered by hand. More results and arguments than tensors."""

    inputs, outputs = ((S0,), (S1,), (R,), None), ((S0,), (R,), None)

    def forward(self, x):
        h = torch.relu(self.up(x))
        if self.mesh is None:
            y = self.whole(h, self.weight, self.scale)
            total = y.sum(0)
        else:
            y, total, number = local_map(
                self.local, self.outputs, self.inputs, device_mesh=self.mesh
            )(h, self.weight, self.scale, 3)
            y = y * (number - 2)
        return self.down(y * total + x)

    def local(self, h, weight, scale, number):
        weight = funcol.all_gather_tensor(weight, 1, self.mesh.get_group())
        y = self.whole(h, weight, scale)
        return y, self.sum(y.sum(0)), number


class Told(Base):
    """Gradients enter whole and leave as told: here nothing is replicated but what is told Partial."""

    inputs, outputs, gradients = ((S0,), (R,), (R,)), ((S0,),), ((S0,), (P,), (P,))

    def local(self, h, weight, scale):
        return self.whole(h, weight, scale)


class Enter(torch.autograd.Function):
    """Copies in, gradients added up: the one end of a block cut as Megatron does."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return funcol.all_reduce(gradient, "sum", ctx.group), None


class Leave(torch.autograd.Function):
    """Parts added up, the gradient as it comes: the other end."""

    @staticmethod
    def forward(ctx, x, group):
        return funcol.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Megatron(Base):
    inputs, outputs = ((R,), (S1,), (S0,)), ((R,),)
    gradients = ((R,), (S1,), (S0,))

    def whole(self, h, weight, scale):
        return torch.relu(h @ weight) * 0.5 + (torch.relu(h @ weight) @ torch.diag(scale))

    def local(self, h, weight, scale):
        group = self.mesh.get_group()
        here = torch.relu(Enter.apply(h, group) @ weight)
        own = torch.zeros(here.shape[1], 16, dtype=h.dtype)
        first = here.shape[1] * self.mesh.get_local_rank()
        rows = torch.arange(here.shape[1])
        own = own.index_put((rows, rows + first), scale + 0.5)
        return Leave.apply(here @ own, group)


class Experted(torch.nn.Module):
    """Tokens sent to their experts and back, as in the zoo."""

    def __init__(self, mesh=None):
        super().__init__()
        self.experts = Experts(4) if mesh is None else DispatchedExperts(mesh, 4)

    def forward(self, x):
        return self.experts(x)[0]


CASES = {
    "summed": (Summed, (2,), {}),
    "checkpointed": (Checkpointed, (2,), {"ac": {"stage_size": "1 KiB"}}),
    "left over": (LeftOver, (2,), {}),
    "mean": (Mean, (2,), {}),
    "handed on": (HandedOn, (2,), {}),
    "mean handed on": (MeanHandedOn, (2,), {}),
    "gathered": (Gathered, (2,), {}),
    "told": (Told, (2,), {}),
    "megatron": (Megatron, (2,), {}),
    "experts in parts": (Experted, (1, 2), {}),
    # copies of the experts see other tokens
    "experts in copies": (Experted, (2, 1), {}),
    "experts, compiled": (Experted, (2,), {"backend": "inductor"}),
}


def compare(make, shape, backend="eager", ac=None):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape)
    model, single = make(mesh).double(), make().double()
    single.load_state_dict(model.state_dict())
    x = torch.randn(8, 16).double()
    placements = (S0,) * mesh.ndim
    with AutoParallel(model, lambda: x, mesh).configure_compile(backend) as ap:
        ap.configure_ac(**(ac or {}))
        ap.add_input_constraints([placements])
        ap.add_output_constraints([placements])
        parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
    assert_trains_alike(parallel, single, x, mesh, placements)


class Dropped(Base):
    inputs, outputs = ((S0,),), ((S0,),)

    def forward(self, x):
        dropped = local_map(self.local, self.outputs, self.inputs, device_mesh=self.mesh)
        return dropped(self.scale * torch.ones_like(x)), self.scale.sum()

    def local(self, x):
        return torch.nn.functional.dropout(x, 0.5)


def dropped():
    """Parts draw their own masks, and backward has the mask of forward."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    with AutoParallel(Dropped(mesh), lambda: torch.ones(16, 16), mesh) as ap:
        ap.configure_compile("eager")
        parallel = ap.apply_placement(ap.optimize_placement(), outputs="dtensor")
    y, _ = parallel(torch.ones(8, 16))
    y = y.full_tensor()
    y.sum().backward()
    first, second = (y != 0).chunk(2)
    assert 0 < first.sum() < 128 and not torch.equal(first, second)
    scale = parallel.scale.full_tensor().detach()
    torch.testing.assert_close(parallel.scale.grad.full_tensor() * scale, y.detach().sum(0))


def run_all():
    cases = {
        name: partial(compare, make, shape, **how) for name, (make, shape, how) in CASES.items()
    }
    return each({**cases, "dropped": dropped})


@pytest.fixture(scope="module")
def results():
    return launch(run_all, 2)


@pytest.mark.parametrize("case", [*CASES, "dropped"])
def test_it_trains_as_one_process_does(results, case):
    for found in results:
        _, error = found[case]
        assert not error, error


# ------------------------------------------------------------- without processes


def planned(model, x=None, mesh=None):
    mesh = mesh or fake_mesh((2,))
    x = torch.randn(8, 16) if x is None else x
    with AutoParallel(model, lambda: x, mesh).configure_device("H100") as ap:
        return ap.configure_compile("eager").optimize_placement(), ap


class Free(Base):
    """Every setting as it is told."""

    def __init__(self, mesh, local=None, **settings):
        super().__init__()
        default = {"out_placements": ((R,),), "in_placements": ((S1,), (S0,)), "device_mesh": mesh}
        self.settings, self.function = {**default, **settings}, local or self.product
        self.mesh = mesh

    def product(self, h, weight):
        return self.sum(h @ weight)

    def forward(self, x):
        return self.down(local_map(self.function, **self.settings)(self.up(x), self.weight) + x)


def test_placements_are_those_told_and_only_those():
    mesh = fake_mesh((2, 2))
    settings = {"out_placements": ((R, S0),), "in_placements": ((S1, S0), (S0, R))}
    plan, ap = planned(Free(mesh, lambda h, w: h @ w, **settings), mesh=mesh)
    ends = {n: c for n, c in plan.choices.items() if "local" in n}
    given = [(c.inputs[0], c.outputs[0]) for n, c in ends.items() if n.startswith("enter")]
    left = [(c.inputs[0], c.outputs[0]) for n, c in ends.items() if n.startswith("leave")]
    whole = (R, R)
    # two inputs, and the gradient of the result; the result, and gradients of both inputs: copies add up
    assert sorted(map(str, given)) == sorted(
        map(str, [((S1, S0), whole), ((S0, R), whole), ((R, S0), whole)])
    )
    assert sorted(map(str, left)) == sorted(
        map(str, [(whole, (R, S0)), (whole, (S1, S0)), (whole, (S0, P))])
    )
    with pytest.raises(ConfigError, match="cannot give"):
        with AutoParallel(
            Free(mesh, lambda h, w: h @ w, **settings), lambda: torch.randn(8, 16), mesh
        ) as ap:
            ap.sharding_optimizer.add_node_constraint("leave_local", (S0, S0))
            ap.optimize_placement()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_mesh": None}, r"local_map at .*test_local_map.py:\d+: give it device_mesh="),
        ({"device_mesh": "other"}, r"device_mesh is .*planned for .*the whole of it"),
        ({"in_placements": ((S1,),)}, "in_placements has 1 entries for 2 arguments"),
        ({"in_placements": ((S1,), None)}, r"in_placements\[1\] is None, and argument 1 is a tensor"),
        ({"in_placements": None}, "in_placements is None: give a tuple"),
        ({"in_placements": ((S1,), (S0, R))}, r"in_placements\[1\] .*1 placements, one for each axis"),
        ({"in_placements": ((Shard(2),), (S0,))}, r"Shard\(dim=2\).*shape is \(8, 32\)"),
        ({"in_placements": ((S0,), (Shard(-3),))}, r"Shard\(dim=-3\).*shape is \(32, 16\)"),
        ({"in_grad_placements": ((S1,),)}, "in_grad_placements has 1 entries for 2"),
        ({"out_placements": (R,)}, "out_placements is .*give a tuple with an entry for each"),
        ({"out_placements": ((Partial("max"),),)}, 'a Partial is a "sum" or an "avg"'),
        ({"out_placements": ((Shard(2),),)}, "Sharding dim 2 greater than tensor ndim 2"),
        ({"out_placements": ((R,), (R,))}, "Expecting 2 outputs"),
        ({"x": torch.randn(7, 16), "in_placements": ((S0,), (R,))}, r"does not cut \(7, 32\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_the_line(settings, message):
    mesh = fake_mesh((2,))
    settings = dict(settings)
    x = settings.pop("x", None)
    if settings.get("device_mesh") == "other":
        settings["device_mesh"] = torch.distributed.DeviceMesh("cpu", [1, 0])
    with pytest.raises((ConfigError, CaptureError), match=message):
        planned(Free(mesh, **settings), x, mesh)


def test_a_call_inside_of_a_call_is_refused():
    mesh = fake_mesh((2,))
    inner = local_map(lambda h: h * 2, ((R,),), ((R,),), device_mesh=mesh)
    with pytest.raises(ConfigError, match="inside of another local_map"):
        planned(Free(mesh, lambda h, w: inner(h) @ w), mesh=mesh)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_backward_of_its_own_that_communicates_has_to_say_what_gradients_are():
    class Unsaid(Megatron):
        gradients = None

    with pytest.raises(CaptureError, match=r"autograd.Function inside it communicates.*in_grad_pl"):
        planned(Unsaid(fake_mesh((2,))))


def test_communication_inside_is_priced_over_its_axis():
    mesh = fake_mesh((2, 4))
    model = Free(
        mesh,
        lambda h, w: funcol.all_reduce(funcol.all_reduce(h @ w, "sum", mesh.get_group(0)), "sum", mesh.get_group(1)),
        out_placements=((R, R),), in_placements=((S1, S1), (S0, S0)),
    )  # fmt: skip
    joint = capture(request(model, lambda: torch.randn(8, 16), mesh=mesh))
    topology = Topology(link_bandwidth=(1e9, 2e9), latency_s=(3e-6, 5e-6))
    finder = OptionFinder(mesh, find_device("H100"), topology)
    found = {n.name: finder.options(n) for n in joint.module.graph.nodes if n.op == "call_function"}
    bytes_ = 8 * 16 * 4
    expected = {
        "all_reduce": 2 * (3e-6 + bytes_ / 2 / 1e9),
        "all_reduce_1": 2 * (5e-6 + bytes_ * 3 / 4 / 2e9),
    }
    for name, seconds in expected.items():
        (option,) = found[name]
        assert option.compute_s == pytest.approx(seconds)
    assert found["wait_tensor"][0].compute_s == 0.0


class Hinted(Base):
    inputs, outputs = ((S0,), (R,), (R,)), ((S0,),)

    def local(self, h, weight, scale):
        with ac_region("inner", save=[aten.mm]):
            y = (h @ weight).relu().sin()
        return (y * scale).cos()


class Around(Hinted):
    def forward(self, x):
        with ac_region("outer"):
            return super().forward(x)


@pytest.mark.parametrize("make", [Hinted, Around])
def test_hints_hold_inside_and_around(make):
    mesh = fake_mesh((2,))
    _, ap = planned(make(mesh), mesh=mesh)
    ap.configure_ac(stage_size=None)
    saved = {v.op: v for v in ap.preview().saved}
    assert saved["aten.mm.default"].reason == 'ac_region "inner" saves aten.mm'
    assert "test_local_map.py" in saved["aten.mm.default"].source
    assert not {"aten.sin.default", "aten.relu.default"} & set(saved) or make is Hinted
    assert len(saved) == 1 or make is Hinted


class Layers(torch.nn.Module):
    """Each layer ends with a call and the next begins with one."""

    def __init__(self, mesh):
        super().__init__()
        self.begin = local_map(torch.sin, ((S0,),), ((S0,),), device_mesh=mesh)
        self.end = local_map(torch.cos, ((S0,),), ((S0,),), device_mesh=mesh)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            with ac_region("layer"):
                x = self.end(torch.relu(layer(self.begin(x))))
        return x


def test_what_a_call_gives_to_a_region_is_what_enters_it():
    mesh = fake_mesh((2,))
    with AutoParallel(Layers(mesh), lambda: torch.randn(8, 16), mesh) as ap:
        ap.configure_compile("eager").configure_ac(stage_size=None)
        ap.add_input_constraints([(S0,)])
        ap.add_parameter_memory_constraint()
        ap.optimize_placement()
    saved = [(v.op, v.reason) for v in ap.preview().saved]
    assert saved == [("aten.cos.default", 'enters ac_region "layer"')] * 2
