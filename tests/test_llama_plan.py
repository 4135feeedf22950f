"""A Llama of real widths on a cluster: FSDP along the data axis, tensor parallel along the other."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from autop_ac import AutoParallel, fake_mesh
from autop_ac.report.plan_table import plan_table
from tests.benchmarks.llama import Llama, LlamaConfig

S0, S1, R = Shard(0), Shard(1), Replicate()
BATCH, LENGTH = 64, 8192


@pytest.fixture(scope="module")
def planned():
    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=1, vocab=8192))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def tokens():
        return torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")

    mesh = fake_mesh((32, 8), ("dp", "tp"))
    ap = AutoParallel(model, tokens, mesh, policy).configure_device("H100")
    with ap:
        ap.add_input_constraints([(S0, R)])
        ap.add_output_constraints([(S0, Shard(2))])
        ap.add_parameter_memory_constraint(0.0, 1 / mesh.size())
        plan = ap.optimize_placement()
    torch.distributed.destroy_process_group()
    return ap, plan


def test_weights_are_cut_along_both_axes_columns_before_rows(planned):
    _, plan = planned
    layer = "layers.0."
    for name, placements in plan.parameters.items():
        if name not in ("cos", "sin"):
            assert placements[0].is_shard() and placements[1].is_shard(), name
    for name in (
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "feed_forward.w1",
        "feed_forward.w3",
    ):
        assert plan.parameters[f"{layer}{name}.weight"][1] == S0, name
    for name in ("attention.wo", "feed_forward.w2"):
        assert plan.parameters[f"{layer}{name}.weight"][1] == S1, name


def test_activations_are_cut_along_both_axes_and_no_matmul_is_done_twice(planned):
    ap, plan = planned
    seen = 0
    for node in ap._joint.module.graph.nodes:
        if node.target is torch.ops.aten.mm.default or "flash_attention" in str(node.target):
            inputs = [p for p in plan.choices[node.name].inputs if p is not None]
            # along each axis something is cut: the batch, rows, columns or what is summed over
            assert all(any(p[axis].is_shard() for p in inputs) for axis in (0, 1)), node
            seen += 1
    assert seen > 20


def test_the_table_tells_what_is_hidden(planned):
    _, plan = planned
    assert 0 < plan.hidden_s < plan.objective_s
    assert "run beside computation" in plan_table(plan)
