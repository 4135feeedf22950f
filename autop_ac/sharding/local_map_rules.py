"""The one option of what is in a `local_map`: placements are the user's, and times those of one device.

Inside, a value is what each device has for itself; to the search it is replicated, of the shape that
it has there, as nothing may move it. So all that is known of operators holds for these too.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..capture.local_map import axis_of, enter, leave
from ..graph.cost import collective_node_time_s, fx_node_time_s, tensor_bytes
from ..graph.devices import DeviceSpec, Link, Topology
from ..placements import parse_placements
from .layout import replicated
from .option import Option, leaves_of, outputs_of


class LocalMapRules:
    """Options of the operators in and around calls of `local_map` on one mesh."""

    def __init__(self, mesh: DeviceMesh, device: DeviceSpec, topology: Topology) -> None:
        self.mesh, self.device, self.topology = mesh, device, topology
        self.whole = replicated(tuple(mesh.shape))

    def option(self, node: torch.fx.Node) -> Option:
        """The placements that a call asks for where it begins and ends, its own in between."""
        if node.target in (enter, leave):
            told = parse_placements(str(node.args[1]))
            ends = (self.whole, told) if node.target is leave else (told, self.whole)
            return Option(ends[:1], ends[1:])
        reads = [n.meta.get("val") for n in leaves_of(node)]
        gives = outputs_of(node)
        return Option(
            tuple(self.whole if isinstance(v, torch.Tensor) else None for v in reads),
            tuple(None if v is None else self.whole for v in gives),
            self._seconds(node),
            sum(tensor_bytes(v) for v in gives if v is not None),
        )

    def _seconds(self, node: torch.fx.Node) -> float:
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            return fx_node_time_s(node, self.device)
        axis = axis_of(node, self.mesh)
        return collective_node_time_s(node, self._slowest if axis is None else self._links[axis])

    @cached_property
    def _links(self) -> list[Link]:
        return list(self.topology.links(self.mesh).values())

    @cached_property
    def _slowest(self) -> Link:
        """For a group that is that of no axis: all devices, over the slowest link."""
        links = self._links
        bandwidth, latency_s = min(x.bandwidth for x in links), max(x.latency_s for x in links)
        return Link(self.mesh.size(), bandwidth, latency_s)
