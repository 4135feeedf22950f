"""Random numbers drawn from seeds that the graph holds, equal where replicated, independent where sharded.

Each random operator becomes one seed (eight bytes, drawn from the generator of the user, which ranks
seed alike), to which a rank adds its number among those that hold different parts, and a draw that
depends on that seed alone. So a mask can be computed again in backward instead of kept, and operators
may be sharded along different mesh axes. Under Inductor the draw is Inductor's own and is fused; run
node by node it is `autop_ac::draw`, here.

An operator that PyTorch has no decomposition for (``randperm``, attention with dropout inside) stays as
it is, and with it all others of its graph: it draws from the generator, whose state is one for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_random as private
from ..capture.local_map import LOCAL_KEY, is_local
from .collect import draws_random

# of the operator that is being recorded
_offset: ContextVar[int | None] = ContextVar("autop_ac_random_offset", default=None)


@torch.library.custom_op("autop_ac::draw", mutates_args=())
def draw(
    size: Sequence[int], seed: torch.Tensor, mode: str, low: int, high: int, device: torch.device
) -> torch.Tensor:
    """Numbers that depend on `seed` alone.

    Args:
        size: shape.  seed: int64 scalar on the CPU.  mode: "rand", "randn" or "randint".
        low, high: bounds of "randint".  device: where the numbers are.
    """
    generator = torch.Generator(device).manual_seed(int(seed))
    if mode == "randint":
        return torch.randint(low, high, size, generator=generator, device=device)
    made = torch.rand if mode == "rand" else torch.randn
    return made(size, generator=generator, device=device, dtype=torch.float32)


@draw.register_fake
def _(
    size: Sequence[int], seed: torch.Tensor, mode: str, low: int, high: int, device: torch.device
) -> torch.Tensor:
    dtype = torch.int64 if mode == "randint" else torch.float32
    return torch.empty(size, dtype=dtype, device=device)


@contextmanager
def drawn_with_offset(offset: int | None) -> Iterator[None]:
    """While open, seeds that are recorded get `offset` added: 0 too, so that ranks record one graph."""
    token = _offset.set(offset)
    try:
        yield
    finally:
        _offset.reset(token)


def random_decompositions(
    graph: fx.Graph, table: Mapping[Any, Any], inductor: bool
) -> Mapping[Any, Callable[..., Any]]:
    """Decompositions of the random operators of a graph into seeds and draws.

    Args:
        graph: the captured joint graph.
        table: Inductor's decompositions, from which those of random operators are taken.
        inductor: draw by Inductor's primitive, as its code does.

    Returns:
        Nothing where some operator has no decomposition: all draw from the generator then.
    """
    seeded = {op: fn for op, fn in table.items() if private.is_seeded(op)}
    seeded |= _draws(inductor)
    return seeded if all(node.target in seeded for node in random_nodes(graph)) else {}


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that draw random numbers."""
    return [n for n in graph.nodes if n.op == "call_function" and draws_random(n)]


def draws_from_seeds(graph: fx.Graph) -> bool:
    """Whether all random numbers of a local graph are drawn from seeds."""
    return all(node.target is private.seeds for node in random_nodes(graph))


def sharded_axes(node: fx.Node, outputs: Sequence[Any]) -> frozenset[int]:
    """Mesh axes along which a random operator's (first placed) output is in parts."""
    if is_local(node):
        return frozenset(node.meta[LOCAL_KEY])
    placed = next(p for p in outputs if p is not None)
    return frozenset(i for i, p in enumerate(placed) if p.is_shard())


def rank_offset(mesh: DeviceMesh, axes: Iterable[int]) -> int:
    """This rank's number among those that must draw independently, along `axes`."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    offset = 0
    for axis in sorted(axes):
        offset = offset * mesh.size(axis) + coordinate[axis]
    return offset


def _draws(inductor: bool) -> dict[Any, Callable[..., Any]]:
    def seed(device: Any) -> Any:
        where = device if inductor else torch.device("cpu")
        drawn = private.lookup_seed(private.seeds(1, where), 0)
        offset = _offset.get()
        return drawn if offset is None else drawn + offset

    def floating(
        mode: str, size: Any, *, dtype: Any = None, device: Any = None, layout: Any = None,
        pin_memory: Any = None,
    ) -> Any:  # fmt: skip
        device = _device(device)
        if inductor:
            drawn = private.random(size, seed(device), mode)
        else:
            drawn = draw(size, seed(device), mode, 0, 0, device)
        return drawn.to(torch.get_default_dtype() if dtype is None else dtype)

    def integers(
        low: int, high: int, size: Any, *, dtype: Any = torch.int64, device: Any = None,
        layout: Any = None, pin_memory: Any = None,
    ) -> Any:  # fmt: skip
        device = _device(device)
        if inductor:
            drawn = private.randint(low, high, size, seed(device))
        else:
            drawn = draw(size, seed(device), "randint", low, high, device)
        return drawn.to(dtype)

    aten = torch.ops.aten
    return {
        aten.rand.default: functools.partial(floating, "rand"),
        aten.randn.default: functools.partial(floating, "randn"),
        aten.randint.low: integers,
        aten.randint.default: functools.partial(integers, 0),
    }


def _device(device: Any) -> torch.device:
    return torch.empty([]).device if device is None else torch.device(device)
