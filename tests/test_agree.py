"""All ranks take the same decisions, and a rank that is not alike is told before anything runs."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from autop_ac import AutopACError, AutoParallel, InfeasibleError, launch
from autop_ac.agree import check_same, from_first_rank
from autop_ac.graph.liveness import backward_order


def layers(size, count, dropout=0.0):
    made = []
    for _ in range(count):
        made += [nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*made)


def order_of_gathers(ap):
    facts, saved = ap.ac_report.basis.facts, ap.ac_report.basis.plan.saved
    run = [facts.values[i] for i in backward_order(facts, saved)]
    return [(v.collective, v.parameter, v.serves) for v in run if v.collective]


def uneven(settings):
    """Shards of 33 and 32 rows: budgets and stages that fall between the sizes of the two ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model, x = layers(65, 6), torch.randn(64, 65)
    found = []
    for ac in settings:
        ap = AutoParallel(model, lambda: torch.randn(64, 65), mesh).configure_compile("eager")
        with ap.configure_ac(**ac):
            ap.add_input_constraints([(Shard(0),)])
            ap.add_output_constraints([(Shard(0),)])
            ap.add_parameter_memory_constraint(0, 0.55)
            plan = ap.optimize_placement()
            try:
                parallel = ap.apply_placement(plan)
            except InfeasibleError as error:
                found.append(str(error))
                continue
        parallel(x.chunk(2)[mesh.get_rank()]).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        for a, b in zip(parallel.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5)
        found.append((order_of_gathers(ap), sorted(v.name for v in ap.ac_report.saved)))
    return found


def test_uneven_shards_lead_to_one_plan_on_all_ranks():
    settings = [{"memory_budget": b} for b in range(100_000, 720_000, 31_000)] + [{}]
    first, second = launch(uneven, 2, settings)
    assert first == second
    assert any(isinstance(f, str) for f in first)
    assert sum(isinstance(f, tuple) for f in first) > 2


def dropped():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    found = []
    for stage in ("auto", 3_276_816, 10_000):
        ap = AutoParallel(layers(64, 6, 0.5), lambda: torch.randn(256, 64), mesh)
        with ap.configure_ac(stage_size=stage).configure_compile("eager"):
            ap.add_parameter_memory_constraint()
            ap.apply_placement(ap.optimize_placement())
        found.append((len(ap.ac_report.basis.facts.values), order_of_gathers(ap)))
    return found


def test_dropout_leads_to_one_graph_and_one_plan_on_all_ranks():
    first, second = launch(dropped, 2)
    assert first == second


def different_models():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = layers(8, 1 + mesh.get_rank())
    ap = AutoParallel(model, lambda: torch.randn(4, 8), mesh).configure_compile("eager")
    with ap, pytest.raises(AutopACError, match=r"the captured graph of ranks \[1\] is not that of"):
        ap.optimize_placement()
    return True


def test_a_rank_with_another_model_is_named_on_every_rank():
    assert launch(different_models, 2) == [True, True]


def primitives():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rank = mesh.get_rank()
    assert from_first_rank(mesh, lambda: f"decided by {rank}") == "decided by 0"

    def refuse():
        raise InfeasibleError("no", budget_bytes=3, smallest_bytes=5)

    with pytest.raises(InfeasibleError, match="no") as caught:
        from_first_rank(mesh, refuse)
    check_same(mesh, "it", "same")
    with pytest.raises(AutopACError, match=r"it of ranks \[3\] is not that of rank 0"):
        check_same(mesh, "it", "other" if rank == 3 else "same")
    return caught.value.smallest_bytes


def test_what_the_first_rank_gives_or_raises_reaches_all_ranks_of_a_two_axis_mesh():
    assert launch(primitives, 4) == [5] * 4
