"""Bad use is refused with an error of ours before anything runs, and leaves torch as it was."""

import pickle

import pytest
import torch
from torch.distributed.tensor import Shard

import autop_ac
from autop_ac import (
    AutoParallel,
    CaptureError,
    ConfigError,
    InfeasibleError,
    Topology,
    UsageError,
    fake_mesh,
)
from autop_ac.graph.devices import described_gpu
from tests.gpt import GPT
from tests.test_settings import settings


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Breaks(Small):
    def forward(self, x):
        torch._dynamo.graph_break()  # noqa: TID251 the documented way to ask for one
        return self.linear(x)


class Constant(torch.nn.Module):
    def forward(self, x):
        return x + 1


def inputs():
    return torch.randn(4, 8)


@pytest.fixture
def mesh():
    return fake_mesh((2,))


def parallelize(model, mesh, **ac):
    with AutoParallel(model, inputs, mesh).configure_ac(**ac) as ap:
        ap.add_input_constraints([(Shard(0),)])
        ap.add_output_constraints([(Shard(0),)])
        return ap.apply_placement(ap.optimize_placement())


def test_compiler_settings_are_as_before_and_tensors_in_the_block_are_real(mesh):
    before = settings()
    with AutoParallel(Small(), inputs, mesh) as ap:
        assert type(torch.ones(1)) is torch.Tensor
        plan = ap.optimize_placement()
        assert type(torch.ones(1)) is torch.Tensor
        ap.apply_placement(plan)
    assert settings() == before


@pytest.mark.parametrize("model", [Breaks(), Constant()])
def test_a_model_that_cannot_be_captured_is_refused_and_the_next_one_works(mesh, model):
    before = settings()
    with pytest.raises(CaptureError), AutoParallel(model, inputs, mesh):
        pass
    assert settings() == before
    assert type(torch.ones(1)) is torch.Tensor
    parallelize(Small(), mesh)


def test_a_graph_break_is_named_by_the_users_line(mesh):
    with (
        pytest.raises(CaptureError, match=r"test_api\.py:\d+"),
        AutoParallel(Breaks(), inputs, mesh),
    ):
        pass


def test_an_exception_in_the_block_leaves_the_settings_alone(mesh):
    before = settings()
    with pytest.raises(ZeroDivisionError), AutoParallel(Small(), inputs, mesh):
        raise ZeroDivisionError
    assert settings() == before


def test_constraints_of_the_wrong_length_or_structure_are_refused(mesh):
    with AutoParallel(Small(), inputs, mesh) as ap:
        with pytest.raises(ConfigError, match="2 input constraints for 1 input"):
            ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        with pytest.raises(ConfigError, match="the mesh has 1 axes"):
            ap.add_output_constraints([(Shard(0), Shard(1))])
        with pytest.raises(ConfigError, match="give a tuple of placements"):
            ap.add_output_constraints([Shard(0)])
        with pytest.raises(ConfigError, match="low <= high"):
            ap.add_parameter_memory_constraint(0.9, 0.1)


def test_a_batch_that_does_not_divide_is_refused(mesh):
    with AutoParallel(Small(), lambda: torch.randn(3, 8), mesh) as ap:
        ap.add_input_constraints([(Shard(0),)])
        with pytest.raises(ConfigError, match="3"):
            ap.optimize_placement()


def test_calls_out_of_order_are_refused(mesh):
    ap = AutoParallel(Small(), inputs, mesh)
    with pytest.raises(UsageError, match="inside the `with` block"):
        ap.optimize_placement()
    with pytest.raises(UsageError, match="no report yet"):
        _ = ap.ac_report
    with ap:
        with pytest.raises(UsageError, match="plan of optimize_placement"):
            ap.apply_placement(None)
    with pytest.raises(UsageError, match="entered before"), ap:
        pass


def test_a_wrong_model_mesh_or_setting_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"nn\.Module"):
        AutoParallel(3, inputs, mesh)
    with pytest.raises(ConfigError, match="DeviceMesh"):
        AutoParallel(Small(), inputs, (2,))
    with pytest.raises(ConfigError):
        AutoParallel(Small(), inputs, mesh).configure_ac(stage_size=-1)
    with pytest.raises(ConfigError):
        AutoParallel(Small(), inputs, mesh).configure_ac(save=["aten.mn"])
    with pytest.raises(ConfigError, match="'stagesize'; did you mean stage_size"):
        AutoParallel(Small(), inputs, mesh).configure_ac(stagesize=None)


def test_a_wrong_local_batch_is_refused_at_the_call(mesh):
    parallel = parallelize(Small(), mesh)
    with pytest.raises(UsageError, match="local shape"):
        parallel(torch.randn(4, 8))


def test_the_public_names_are_there():
    for name in autop_ac.__all__:
        assert hasattr(autop_ac, name), name


def test_a_budget_is_held_or_refused_and_the_curve_says_what_can_be_reached():
    ap = AutoParallel(GPT(), lambda: torch.randint(64, (8, 16)), fake_mesh((2,)))
    # a budget leaves room for what is gathered ahead, which is much of so small a model
    ap.configure_comm(prefetch=False)
    with ap.configure_ac(enable=False).configure_compile("eager"):
        ap.add_parameter_memory_constraint()
        plan = ap.optimize_placement()
        ap.apply_placement(plan)
    without = ap.ac_report
    curve = ap.pareto()
    assert isinstance(curve, autop_ac.ParetoCurve)
    rows = [line for line in str(curve).splitlines() if "memory_budget=" in line]
    settings = [row.split("|")[1].split(",")[0].strip() for row in rows]
    assert settings == [f"memory_budget={p.peak_bytes}" for p in curve]
    assert max(map(len, str(curve).splitlines())) <= 80
    assert repr(curve) == str(curve) == str(pickle.loads(pickle.dumps(curve)))
    assert 'or "device"' in rows[-1] and "saved=" not in repr(curve[0])
    assert curve._repr_html_().count("<tr>") == 1 + len(curve)
    peaks, times = zip(*((p.peak_bytes, p.recompute_time_s) for p in curve), strict=True)
    assert len(curve) > 2
    assert list(peaks) == sorted(set(peaks))
    assert list(times) == sorted(set(times), reverse=True)
    middle = (peaks[0] + peaks[-1]) // 2
    ap.configure_ac(memory_budget=middle).apply_placement(plan)
    assert ap.ac_report.peak_bytes <= middle < without.peak_bytes
    assert ap.ac_report.recompute_s > without.recompute_s
    assert "a budget of" in str(ap.ac_report)
    with pytest.raises(InfeasibleError) as caught:
        ap.configure_ac(memory_budget=peaks[0] // 2).apply_placement(plan)
    assert caught.value.budget_bytes == peaks[0] // 2
    assert caught.value.smallest_bytes == peaks[0]
    with pytest.raises(UsageError, match="apply_placement first"):
        AutoParallel(Small(), inputs, fake_mesh((2,))).pareto()


def test_more_settings_that_are_wrong_are_refused_where_they_are_set(mesh):
    def made(**options):
        return AutoParallel(Small(), inputs, mesh, **options)

    with pytest.raises(ConfigError, match="unknown device 5"):
        made().configure_device(5)
    with pytest.raises(ConfigError, match="topology describes 2 axes; the mesh has 1"):
        made().configure_device(topology=Topology((1e9, 1e9), (0.0, 0.0)))
    with pytest.raises(ConfigError, match="MixedPrecisionPolicy"):
        made(mp_policy=torch.bfloat16)
    with pytest.raises(ConfigError, match='"local" or "dtensor"'):
        made().parallelize(outputs="DTensor")
    with made() as ap, pytest.raises(ConfigError, match="give one placement for each"):
        ap.sharding_optimizer.add_node_constraint("relu", (Shard(0), Shard(0)))
    with AutoParallel(GPT(), lambda: torch.randint(64, (8, 16)), mesh) as other:
        plan = other.optimize_placement()
    with made() as ap, pytest.raises(UsageError, match="another model"):
        ap.apply_placement(plan)


def test_a_tensor_that_is_no_buffer_is_refused_by_name(mesh):
    model = Small()
    model.scale = torch.ones(8)
    model.forward = lambda x: torch.relu(model.linear(x)) * model.scale
    with pytest.raises(CaptureError, match="register_buffer"), AutoParallel(model, inputs, mesh):
        pass


@pytest.mark.parametrize(
    ("name", "known"), [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100")]
)
def test_a_vendors_name_is_known(name, known):
    assert described_gpu(name).name == known
    with pytest.raises(ConfigError, match="unknown device 'NVIDIA L4'"):
        described_gpu("NVIDIA L4")


def test_a_rule_that_matches_nothing_is_told_of_before_anything_is_applied():
    ap = AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(8, 4), fake_mesh(2))
    with ap.configure_ac(rules=["blocks.*=save"]):
        ap.optimize_placement()
    with pytest.warns(UserWarning, match="blocks.* matches none"):
        ap.estimate()


def test_a_mesh_of_cuda_devices_that_are_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mesh = fake_mesh(2, device_type="cuda")
    with (
        pytest.raises(ConfigError, match="configure_device"),
        AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(8, 4), mesh),
    ):
        pass


def test_a_mesh_whose_ranks_are_out_of_order_is_refused():
    """Groups count ranks upwards: what the first rank decides would come from the second."""
    fake_mesh(4)
    for ranks in ([1, 0], [[0, 1], [3, 2]], [[2, 3], [0, 1]]):
        mesh = torch.distributed.DeviceMesh("cpu", ranks)
        with pytest.raises(ConfigError, match=r"ranks of the mesh are \[.*grow along each axis"):
            AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(8, 4), mesh).__enter__()
    columns = torch.distributed.DeviceMesh("cpu", [[0, 2], [1, 3]])
    AutoParallel(torch.nn.Linear(4, 4), lambda: torch.randn(8, 4), columns).__enter__()
