"""Groups of the program: one per placeholder, operator and result, with its options."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial

from ..capture.joint import JointGraph, Port
from ..graph.devices import DeviceSpec, Topology
from .fold import is_tensor_node
from .layout import free_placements, local_bytes, replicated
from .option import Option, leaves_of, outputs_of, producer_of
from .plan import Placements


@dataclass(frozen=True)
class Settings:
    """What the program is built for.

    Attributes:
        fold: whether equal layers share variables.
        prefetch: whether computation hides collectives of parameters.
    """

    mesh: DeviceMesh
    device: DeviceSpec
    topology: Topology
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    fold: bool = True
    prefetch: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(self.mesh.shape)


@dataclass
class Draft:
    """Groups as they are collected, in graph order; `nodes` holds the first of each group's nodes."""

    names: list[str] = field(default_factory=list)
    options: list[tuple[Option, ...]] = field(default_factory=list)
    nodes: list[torch.fx.Node | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, options: Iterable[Option], node: torch.fx.Node | None = None) -> int:
        """A new group of one node, or of none where it is a result."""
        self.names.append(name)
        self.options.append(tuple(options))
        self.nodes.append(node)
        self.counts.append(1)
        self.group_of[name] = len(self.names) - 1
        return len(self.names) - 1

    def join(self, name: str, group: int) -> None:
        """One more node of a group."""
        self.counts[group] += 1
        self.group_of[name] = group


def placed(placements: Placements, value: torch.Tensor, settings: Settings) -> Option:
    size = local_bytes(value.shape, value.element_size(), placements, settings.shape)
    return Option((), (placements,), 0.0, size)


def placeholder_options(
    node: torch.fx.Node,
    port: Port,
    inputs: dict[int, Placements | None],
    mesh_shape: tuple[int, ...],
) -> list[Option]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return [Option((), (None,))]
    if port.kind == "input" and inputs.get(port.index) is not None:
        allowed = [inputs[port.index]]
    elif port.kind == "buffer":  # all devices must agree on it, and it is seldom large
        allowed = [replicated(mesh_shape)]
    else:
        allowed = list(free_placements(value.shape, mesh_shape, uneven=port.kind == "parameter"))
    return [
        Option((), (p,), 0.0, local_bytes(value.shape, value.element_size(), p, mesh_shape))
        for p in allowed
        if p is not None
    ]


def uneven_casts(
    node: torch.fx.Node, options: Sequence[Option], settings: Settings
) -> list[Option]:
    value = outputs_of(node)[0]
    assert value is not None
    have = {o.outputs[0] for o in options}
    extra = []
    for placements in free_placements(value.shape, settings.shape, uneven=True):
        if placements not in have:
            size = local_bytes(value.shape, value.element_size(), placements, settings.shape)
            time_s = 2 * size / settings.device.memory_bandwidth
            extra.append(Option((placements,), (placements,), time_s, size))
    return extra


def drop_unreachable(draft: Draft, joint: JointGraph) -> None:
    """Drop options that read a Partial which no producer can give, and repeated options.

    Nothing becomes Partial by a move, so an option that wants one needs a producer that gives it.
    """
    sources: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for node in joint.module.graph.nodes:
        if is_tensor_node(node):
            for slot, leaf in enumerate(leaves_of(node)):
                source = source_of(draft, leaf)
                if source is not None:
                    sources[draft.group_of[node.name], slot].add(source)
    changed = True
    while changed:  # layers read layers of their own kind, so that one pass need not be enough
        changed = False
        for (group, slot), givers in sources.items():
            available = {
                _partials(o.outputs[output]) for g, output in givers for o in draft.options[g]
            }
            wanting = {_partials(o.inputs[slot]) for o in draft.options[group]}
            possible = {w for w in wanting if any(_covers(a, w) for a in available)}
            kept = tuple(o for o in draft.options[group] if _partials(o.inputs[slot]) in possible)
            changed = changed or len(kept) < len(draft.options[group])
            draft.options[group] = kept
    for group, options in enumerate(draft.options):
        best: dict[Any, Option] = {}
        for option in options:
            key = (option.inputs, option.outputs)
            if key not in best or option.compute_s < best[key].compute_s:
                best[key] = option
        draft.options[group] = tuple(best.values())


@functools.cache
def _partials(placements: Placements | None) -> tuple[Partial | None, ...]:
    return tuple(p if isinstance(p, Partial) else None for p in placements or ())


def _covers(given: tuple[Partial | None, ...], wanted: tuple[Partial | None, ...]) -> bool:
    return not wanted or all(w is None or w == g for g, w in zip(given, wanted, strict=True))


def source_of(draft: Draft, leaf: torch.fx.Node) -> tuple[int, int] | None:
    """(group, output) that gives a leaf, getitem looked through; None where it is no tensor."""
    leaf, index = producer_of(leaf)
    group = draft.group_of.get(leaf.name)
    if group is None or outputs_of(leaf)[index] is None:
        return None
    return group, index
