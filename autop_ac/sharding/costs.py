"""Seconds to bring a tensor from one placement to another, priced one mesh axis at a time.

Axes change from the last to the first, as DTensor moves nested shards. From Shard to Replicate is an
all-gather, from Partial to Replicate an all-reduce, from Partial to Shard a reduce-scatter, from one
Shard to another an all-to-all, from Replicate to Shard a slice that costs nothing. Nothing becomes
Partial. Where two axes shard one dim, the outer one can only change after the inner one is gathered.
Collectives work on dim 0: a shard of another dim costs one more pass over memory, for the copy.

All pairs of placements of one tensor are priced at once, as arrays over [source, target].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..graph.devices import Topology
from .plan import Placements

Array = np.ndarray
_REPLICATE = -1  # codes of placements: a Shard is its dim, a Partial is below _REPLICATE
_PARTIAL = {"sum": -2, "avg": -3}


def _code(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return placement.dim
    if isinstance(placement, Partial):
        return _PARTIAL[placement.reduce_op]
    assert isinstance(placement, Replicate)
    return _REPLICATE


class RedistributionCosts:
    """Seconds per redistribution on one mesh, memoised by shape, size of an element and placements."""

    def __init__(
        self,
        mesh_shape: tuple[int, ...],
        topology: Topology,
        memory_bandwidth: float,
    ) -> None:
        self.mesh_shape = mesh_shape
        self.topology = topology
        self.memory_bandwidth = memory_bandwidth
        self._memo: dict[tuple[object, ...], Array] = {}
        self._codes: dict[Placements, list[int]] = {}

    def seconds(self, value: torch.Tensor, source: Placements, target: Placements) -> float | None:
        """Seconds to bring `value` (of global shape) from `source` to `target`; None: impossible."""
        price = float(self.matrix(value, (source,), (target,))[0, 0])
        return price if np.isfinite(price) else None

    def matrix(
        self, value: torch.Tensor, sources: Sequence[Placements], targets: Sequence[Placements]
    ) -> Array:
        """Seconds of each move as an array [source, target]; infinite where it is impossible."""
        key = (tuple(value.shape), value.element_size(), tuple(sources), tuple(targets))
        if key not in self._memo:
            self._memo[key] = self._price(*key)
        return self._memo[key]

    def ends_partial(self, sources: Sequence[Placements], targets: Sequence[Placements]) -> Array:
        """Which moves [source, target] sum up a Partial."""
        p, q = self._encode(sources)[:, None, :], self._encode(targets)[None, :, :]
        return ((p < _REPLICATE) & (p != q)).any(-1)

    def _price(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        sources: tuple[Placements, ...],
        targets: tuple[Placements, ...],
    ) -> Array:
        axes = len(self.mesh_shape)
        p, q = self._encode(sources)[:, None, :], self._encode(targets)[None, :, :]
        both = (len(sources), len(targets))
        p_axis = [np.broadcast_to(p[..., a], both) for a in range(axes)]
        q_axis = [np.broadcast_to(q[..., a], both) for a in range(axes)]
        now, seconds = list(p_axis), np.zeros(both)
        forbidden = self._forbidden(shape, p, q)
        for axis in reversed(range(axes)):
            source, target = p_axis[axis], q_axis[axis]
            outer = np.zeros(both, dtype=bool)
            for before in range(axis):
                a, b = p_axis[before], q_axis[before]
                outer |= (a != b) & ((a == source) | (b == source))
            regather = (source == target) & (source >= 0) & outer
            to = np.where(regather, _REPLICATE, target)
            step = self._step(shape, itemsize, now, axis, to)
            seconds += np.where(source != to, step, 0.0)
            now[axis] = to  # what was gathered only for an outer axis is cut again, for nothing
        seconds[forbidden] = np.inf
        return seconds

    def _encode(self, placements: Sequence[Placements]) -> Array:
        for one in placements:
            if one not in self._codes:
                self._codes[one] = [_code(p) for p in one]
        return np.array([self._codes[one] for one in placements], dtype=np.int64)

    def _forbidden(self, shape: tuple[int, ...], p: Array, q: Array) -> Array:
        """Moves that make a Partial, and exchanges of uneven shards."""
        makes_partial = ((q < _REPLICATE) & (p != q)).any(-1)
        swapped = ((p >= 0) & (q >= 0) & (p != q)).any(-1)
        return makes_partial | (swapped & ~(self._even(shape, p) & self._even(shape, q)))

    def _even(self, shape: tuple[int, ...], codes: Array) -> Array:
        even = np.ones(codes.shape[:-1], dtype=bool)
        for dim, size in enumerate(shape):
            cut = np.ones(codes.shape[:-1], dtype=np.int64)
            for axis, count in enumerate(self.mesh_shape):
                cut = np.where(codes[..., axis] == dim, cut * count, cut)
            even &= size % cut == 0
        return even

    def _held(self, shape: tuple[int, ...], itemsize: int, now: Sequence[Array]) -> Array:
        """Bytes of the largest shard, each cut rounded up."""
        held = np.full(now[0].shape, itemsize, dtype=np.int64)
        for dim, size in enumerate(shape):
            part = np.full(now[0].shape, size, dtype=np.int64)
            for codes, count in zip(now, self.mesh_shape, strict=True):
                part = np.where(codes == dim, -(-part // count), part)
            held = held * part
        return held

    def _step(
        self, shape: tuple[int, ...], itemsize: int, now: Sequence[Array], axis: int, target: Array
    ) -> Array:
        """Seconds of the change on one axis, where there is one."""
        count = self.mesh_shape[axis]
        source, held = now[axis], self._held(shape, itemsize, now)
        gathers = (source >= 0) & (target < 0)
        full = np.where(gathers, held * count, held)
        passes = np.where((source < _REPLICATE) & (target < 0), 2.0, 1.0)  # of an all-reduce
        copied = np.where((source > 0) | (target > 0), 2.0 * full, 0.0)
        link = self.topology.latency_s[axis] + full * (
            (count - 1) / count / self.topology.link_bandwidth[axis]
        )
        collective = passes * link if count > 1 else np.zeros(full.shape)
        seconds = collective + copied / self.memory_bandwidth
        return np.where(source == _REPLICATE, 0.0, seconds)
