"""Seconds to bring a tensor from one placement to another, priced one mesh axis at a time.

Axes change from the last to the first, as DTensor moves nested shards. From Shard to Replicate is an
all-gather, from Partial to Replicate an all-reduce, from Partial to Shard a reduce-scatter, from one
Shard to another an all-to-all, from Replicate to Shard a slice that costs nothing. Nothing becomes
Partial. Where two axes shard one dim, the outer one can only change after the inner one is gathered.
Collectives work on dim 0: a shard of another dim costs one more pass over memory, for the copy.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..graph.cost import Collective, collective_time_s
from ..graph.devices import Topology
from .layout import local_bytes
from .plan import Placements


class RedistributionCosts:
    """Seconds per redistribution on one mesh, memoised by shape, size of an element and placements."""

    def __init__(
        self, mesh_shape: tuple[int, ...], topology: Topology, memory_bandwidth: float
    ) -> None:
        self.mesh_shape = mesh_shape
        self.topology = topology
        self.memory_bandwidth = memory_bandwidth
        self._memo: dict[tuple[object, ...], float | None] = {}

    def seconds(self, value: torch.Tensor, source: Placements, target: Placements) -> float | None:
        """Seconds to bring `value` (of global shape) from `source` to `target`; None: impossible."""
        if source == target:
            return 0.0
        key = (tuple(value.shape), value.element_size(), source, target)
        if key not in self._memo:
            self._memo[key] = self._price(tuple(value.shape), value.element_size(), source, target)
        return self._memo[key]

    def _price(
        self, shape: tuple[int, ...], itemsize: int, source: Placements, target: Placements
    ) -> float | None:
        pairs = list(zip(source, target, strict=True))
        if any(isinstance(q, Partial) and p != q for p, q in pairs):
            return None
        swapped = any(isinstance(p, Shard) and isinstance(q, Shard) and p != q for p, q in pairs)
        if swapped and not (self._even(shape, source) and self._even(shape, target)):
            return None
        now, seconds = list(source), 0.0
        for axis in reversed(range(len(pairs))):
            p, q = pairs[axis]
            if p == q and isinstance(p, Shard) and self._outer_moves(pairs, axis, p.dim):
                seconds += self._step(shape, itemsize, now, axis, None)
                now[axis] = Replicate()  # cut again at the end, which costs nothing
                continue
            if p != q:
                seconds += self._step(shape, itemsize, now, axis, q)
            now[axis] = q
        return seconds

    def _outer_moves(self, pairs: list[tuple[Placement, Placement]], axis: int, dim: int) -> bool:
        return any(p != q and Shard(dim) in (p, q) for p, q in pairs[:axis])

    def _even(self, shape: tuple[int, ...], placements: Placements) -> bool:
        sizes = list(shape)
        for placement, count in zip(placements, self.mesh_shape, strict=True):
            if isinstance(placement, Shard):
                if sizes[placement.dim] % count:
                    return False
                sizes[placement.dim] //= count
        return True

    def _step(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        now: list[Placement],
        axis: int,
        target: Placement | None,
    ) -> float:
        """One axis; a `target` of None gathers a Shard."""
        count = self.mesh_shape[axis]
        bandwidth = self.topology.link_bandwidth[axis]
        latency = self.topology.latency_s[axis]
        held = local_bytes(shape, itemsize, tuple(now), self.mesh_shape)
        source = now[axis]
        dims = [p.dim for p in (source, target) if isinstance(p, Shard)]
        if isinstance(source, Partial):
            kind: Collective = "reduce_scatter" if isinstance(target, Shard) else "all_reduce"
            full = held
        elif isinstance(source, Shard):
            kind = "all_to_all" if isinstance(target, Shard) else "all_gather"
            full = held if isinstance(target, Shard) else held * count
        else:
            return 0.0
        copied = 2 * full if any(dims) else 0
        return (
            collective_time_s(kind, full, count, bandwidth, latency)
            + copied / self.memory_bandwidth
        )
