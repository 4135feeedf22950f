"""Eight ranks in one process: the graphs that run on each, under torch's `LocalTensorMode`.

It runs the two partitioned graphs of one rank for all of them, with collectives between: what is in the
graph of a rank alone (which slice is mine, seeds) must not be there, so parameters and batch are sharded along
every axis that is used. AOTAutograd takes no such tensor as a tangent, so backward is called by hand.
"""

import copy

import pytest
import torch
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autop_ac.lowering.compile
from autop_ac import AutoParallel, fake_mesh
from tests.gpt import GPTConfig, HintedGPT, mean_loss

S0, R = Shard(0), Replicate()
CONFIG = GPTConfig(vocab_size=32, dim=16, heads=2, layers=1, context=8, tied=False)


class WithoutPositions(HintedGPT):
    """Positions are equal on all ranks: their sharding would cut a slice, each rank another."""

    def __init__(self, config):
        super().__init__(config)
        del self.positions

    def embed(self, tokens):
        return self.tokens(tokens)


def everywhere(ap, plan, graphs, values):
    """Loss and whole gradients by parameter, of one step on all ranks of the mesh of `ap`.

    Args:
        graphs: forward and backward, of one rank.
        values: whole tensors by the name of a parameter, or the index of an input.
    """
    joint, mesh = ap._joint, ap._mesh
    forward, backward = graphs
    with LocalTensorMode(mesh.size()):
        held = {}
        for node in forward.graph.find_nodes(op="placeholder"):
            port = joint.placeholders[node.name]
            whole = values[port.name if port.kind == "parameter" else port.index]
            placements = plan.choices[node.name].outputs[0]
            part = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
            held[node.name] = part.to_local()
        given = forward.graph.output_node().args[0]
        results = torch.fx.Interpreter(forward).run(*held.values())
        held |= {n.name: r for n, r in zip(given, results, strict=True)}
        tangent = torch.ones_like(results[0])
        holders = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        gradients = torch.fx.Interpreter(backward).run(*(held.get(n, tangent) for n in holders))
        found = {}
        for port, gradient in zip(
            joint.results[joint.num_forward_outputs :], gradients, strict=True
        ):
            if port is not None and port.kind == "gradient":
                whole = DTensor.from_local(gradient, mesh, plan.parameters[port.name])
                found[port.name] = whole.full_tensor().reconcile()  # equal on all ranks
        return results[0].reconcile(), found


@pytest.mark.parametrize(
    ("shape", "comm"),
    [((2, 2, 2), {}), ((4, 2), {"prefetch": True, "all_gather_bucket": "64 KiB"})],
    ids=str,
)
def test_gradients_of_eight_ranks_are_those_of_one(monkeypatch, shape, comm):
    graphs = []
    real = autop_ac.lowering.compile.partition

    def spied(*args, **kwargs):
        graphs.append(copy.deepcopy(real(*args, **kwargs)))
        return real(*args, **kwargs)

    monkeypatch.setattr(autop_ac.lowering.compile, "partition", spied)
    torch.manual_seed(0)
    model, mesh = WithoutPositions(CONFIG), fake_mesh(shape)
    x, y = torch.randint(32, (2, 8, 8))
    ap = AutoParallel(model, lambda: (x, y), mesh, loss_fn=mean_loss).configure_compile("eager")
    everywhere_cut = (S0,) * mesh.ndim
    with ap.configure_comm(**comm).configure_ac(stage_size=None):
        ap.add_input_constraints([everywhere_cut, everywhere_cut])
        for (
            node
        ) in ap._joint.module.graph.nodes:  # each weight is cut along all axes, and read whole
            port = ap._joint.placeholders.get(node.name)
            if port is not None and port.kind == "parameter":
                ap.sharding_optimizer.add_node_constraint(port.name, everywhere_cut)
                for user in node.users:
                    if user.op == "call_function" and len(user.all_input_nodes) == 1:
                        ap.sharding_optimizer.add_node_constraint(user, (R,) * mesh.ndim)
        plan = ap.optimize_placement()
        ap.apply_placement(plan)
    parameters = dict(model.named_parameters())
    loss, gradients = everywhere(ap, plan, graphs[0], {**parameters, 0: x, 1: y})
    expected = mean_loss(model(x), y)
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-6)
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name
