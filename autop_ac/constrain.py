"""What the user fixes of a plan, call by call, while the captured graph is open."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from .capture.joint import JointGraph
from .config import OPTIMIZER_COPIES, parse_bytes
from .errors import ConfigError, UsageError
from .near import did_you_mean
from .sharding.constraints import Constraints
from .sharding.layout import counted

PlacementsPerTensor = Sequence[Sequence[Placement] | None]


class Constrained:
    """The captured graph, open for constraints inside the block, and the constraints so far."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._constraints = Constraints()
        self._state: Literal["new", "open", "closed"] = "new"
        self._joint: JointGraph | None = None
        self.sharding_optimizer = NodeConstraints(self)

    def _open_joint(self, call: str) -> JointGraph:
        if self._state == "new":
            raise UsageError(f"{call} needs the captured graph: call it inside the `with` block")
        if self._joint is None:
            raise UsageError(f"{call}: the capture failed, so there is no graph; make a new object")
        return self._joint

    def _constrain(self, call: str, **changes: Any) -> None:
        self._open_joint(call)
        if self._state == "closed":
            raise UsageError(f"{call} came after the `with` block ended; constrain before that")
        self._constraints = dataclasses.replace(self._constraints, **changes)

    def add_input_constraints(self, placements: PlacementsPerTensor | None) -> None:
        """Fix the placements of the inputs: one entry per tensor input, None leaves it free."""
        self._constrain("add_input_constraints", inputs=self._per_tensor(placements, "input"))

    def add_output_constraints(self, placements: PlacementsPerTensor | None) -> None:
        """Fix the placements of the outputs: one entry per tensor output, None leaves it free."""
        self._constrain("add_output_constraints", outputs=self._per_tensor(placements, "output"))

    def add_parameter_memory_constraint(
        self, low: float | None = None, high: float | None = None
    ) -> None:
        """Bound the parameter bytes of one device, as fractions of all parameter bytes.

        Args:
            low: least fraction, None for 0.  high: most, None for ``1 / mesh.size()``.
        """
        high = 1 / self._mesh.size() if high is None else high
        low = 0.0 if low is None else low
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"parameter memory between low={low} and high={high} of all bytes: give "
                "0 <= low <= high <= 1"
            )
        self._constrain("add_parameter_memory_constraint", parameter_low=low, parameter_high=high)

    def add_state_memory_constraint(
        self, limit: str | int, optimizer: str | None = "adamw"
    ) -> None:
        """Bound the bytes of parameters, gradients and optimizer state together, on one device.

        Args:
            limit: ``"40 GiB"``, or an int of bytes; rounded down.
            optimizer: as in `ACConfig`; None for one without state.
        """
        limit_bytes = parse_bytes(limit, name="limit", round_down=True, off="no call")
        if optimizer is not None and optimizer not in OPTIMIZER_COPIES:
            raise ConfigError(
                f"optimizer={optimizer!r}: allowed are {', '.join(OPTIMIZER_COPIES)}; None for one without "
                f"state{did_you_mean(optimizer, OPTIMIZER_COPIES)}"
            )
        copies = 0 if optimizer is None else OPTIMIZER_COPIES[optimizer]
        self._constrain("add_state_memory_constraint", state_bytes=limit_bytes, state_copies=copies)

    def _per_tensor(self, placements: PlacementsPerTensor | None, kind: str) -> Any:
        joint = self._open_joint(f"add_{kind}_constraints")
        if placements is None:
            return None
        tensors = _inputs(joint) if kind == "input" else _outputs(joint)
        if len(placements) != len(tensors):
            raise ConfigError(
                f"{len(placements)} {kind} constraints for {len(tensors)} {kind} tensors: give one tuple "
                "of placements (or None) for each"
            )
        found: list[tuple[Placement, ...] | None] = []
        for i, (entry, (name, value)) in enumerate(zip(placements, tensors, strict=True)):
            if entry is None:
                found.append(None)
                continue
            if not isinstance(entry, Iterable) or isinstance(entry, Placement):
                raise ConfigError(f"{kind} constraint {i} is {entry!r}; give a tuple of placements")
            given = tuple(entry)
            if len(given) != self._mesh.ndim:
                raise ConfigError(
                    f"{kind} constraint {i} is {given}; the mesh has {self._mesh.ndim} axes, "
                    "give one placement for each"
                )
            if not all(isinstance(p, Placement) for p in given):
                raise ConfigError(f"{kind} constraint {i} is {given}, not all placements")
            found.append(counted(given, value.shape, f"{kind} constraint {i} ({name})"))
        return tuple(found)


def _inputs(joint: JointGraph) -> list[tuple[str, Any]]:
    """Name and value of each tensor input."""
    nodes = {n.name: n for n in joint.module.graph.find_nodes(op="placeholder")}
    ports = {p.index: (p.name, name) for name, p in joint.placeholders.items() if p.kind == "input"}
    return [(ports[i][0], nodes[ports[i][1]].meta["val"]) for i in sorted(ports)]


def _outputs(joint: JointGraph) -> list[tuple[str, Any]]:
    """Name and value of each tensor output."""
    results = zip(joint.results, joint.module.graph.output_node().args[0], strict=True)
    found = {p.index: (p.name, n.meta["val"]) for p, n in results if p and p.kind == "output"}
    return [found[i] for i in sorted(found)]


class NodeConstraints:
    """Constraints on nodes of the captured graph and on modules (``ap.sharding_optimizer``)."""

    def __init__(self, owner: Constrained) -> None:
        self._owner = owner

    def add_node_constraint(self, node: Any, placement: Sequence[Placement]) -> None:
        """Fix the placement of what a node gives.

        Args:
            node: an FX node of the captured graph, its name, or a parameter's name.
            placement: one placement per mesh axis.
        """
        owner = self._owner
        joint = owner._open_joint("add_node_constraint")
        name = node if isinstance(node, str) else node.name
        known = {n.name: n.meta.get("val") for n in joint.module.graph.nodes}
        for holder, port in joint.placeholders.items():
            if port.kind == "parameter":
                known[port.name] = known[holder]
        if name not in known:
            raise ConfigError(
                f"no node or parameter {name!r} in the captured graph{did_you_mean(name, known)}"
            )
        given = self._per_axis("node", placement)
        value = known[name]
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if isinstance(first, torch.Tensor):
            given = counted(given, first.shape, f"node constraint {name!r}")
        nodes = {**owner._constraints.nodes, name: given}
        owner._constrain("add_node_constraint", nodes=nodes)

    def add_module_constraint(self, modules: str, placement: Sequence[Placement]) -> None:
        """Fix the placement of what modules hand to others in forward.

        Args:
            modules: a module path or a glob on paths, ``"layers.*.attention"``.
            placement: one placement per mesh axis.
        """
        owner = self._owner
        given = self._per_axis("module", placement)
        held = {**owner._constraints.modules, modules: given}
        owner._constrain("add_module_constraint", modules=held)

    def _per_axis(self, kind: str, placement: Sequence[Placement]) -> tuple[Placement, ...]:
        axes = self._owner._mesh.ndim
        given = (placement,) if isinstance(placement, Placement) else tuple(placement)
        if len(given) != axes or not all(isinstance(p, Placement) for p in given):
            raise ConfigError(
                f"{kind} constraint {placement!r}: the mesh has {axes} axes, give one placement for each"
            )
        return given
