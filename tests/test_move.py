"""Moves between placements, on four real processes, against the parts of the whole tensor."""

import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autop_ac import launch
from autop_ac.sharding.layout import divides
from autop_ac.sharding.move import move

EVEN, UNEVEN = (4, 8, 12), (3, 4, 4)


def part(value, placements, mesh):
    """This rank's part; of a Partial, all of it on the first device of the axis."""
    sharded = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(value, mesh, sharded).to_local()
    first = all(
        mesh.get_local_rank(axis) == 0 for axis, p in enumerate(placements) if p.is_partial()
    )
    return local if first else torch.zeros_like(local)


def every_move():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    plain = [Replicate(), Shard(0), Shard(1), Shard(2)]
    exchanged = 0
    for shape in (EVEN, UNEVEN):
        value = torch.randn(shape)
        targets = [p for p in itertools.product(plain, plain) if divides(shape, p, (2, 2))]
        sources = itertools.product([*plain, Partial("sum")], repeat=2)
        sources = [p for p in sources if divides(shape, p, (2, 2))]
        for have, wanted in itertools.product(sources, targets):
            local = part(value, have, mesh)
            got = move(local, value, have, wanted, mesh)
            assert torch.equal(got, part(value, wanted, mesh)), (shape, have, wanted)
            assert got.is_contiguous(), (shape, have, wanted)
            if shape == EVEN and sum(a != b for a, b in zip(have, wanted)) == 1:
                graph = make_fx(lambda x: move(x, value, have, wanted, mesh))(local)  # noqa: B023
                exchanged += count_exchanges(graph, have, wanted)
    assert exchanged == 36


def count_exchanges(graph, have, wanted):
    """One for a move that is an all-to-all: of one axis, that no inner axis stands in the way of."""
    names = [str(n.target) for n in graph.graph.nodes]
    found = sum("all_to_all" in name for name in names)
    if found:
        assert found == 1 and not any("all_gather" in name for name in names)
        ((a, b),) = [(a, b) for a, b in zip(have, wanted) if a != b]
        assert isinstance(a, Shard) and isinstance(b, Shard)
    return found


def test_every_move_on_two_axes_gives_the_part_of_the_whole():
    launch(every_move, 4)
