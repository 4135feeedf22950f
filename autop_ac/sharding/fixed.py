"""Placements that the user fixed inside the graph: of nodes, of modules, and where the model says so."""

from __future__ import annotations

import torch

from ..capture.joint import JointGraph
from ..capture.marks import placed_of
from ..capture.names import module_path
from ..errors import ConfigError
from ..near import did_you_mean
from ..placements import parse_placements
from ..policies import module_matches
from .chains import is_backward
from .constraints import Constraints
from .fold import is_tensor_node
from .groups import Draft
from .layout import counted, even_local_shape
from .option import outputs_of
from .plan import Placements

Fixed = dict[tuple[torch.fx.Node, int], Placements]  # by node and number of its output


def fixed_by_modules(joint: JointGraph, constraints: Constraints) -> Fixed:
    """What the forward of each constrained module hands to others, with its placements."""
    paths = {n: _path(joint, n) for n in joint.module.graph.nodes if n.op == "call_function"}
    found: Fixed = {}
    for glob, placements in constraints.modules.items():
        matched = False
        for node, path in paths.items():
            module = instance_of(glob, path)
            if module is None or is_backward(node):
                continue
            readers = [u for u in node.users if not is_backward(u)]
            if all(instance_of(glob, paths.get(u, "")) == module for u in readers):
                continue
            given, output = (node, 0) if is_tensor_node(node) else (node.args[0], node.args[1])
            value = outputs_of(given)[output] if is_tensor_node(given) else None
            if value is not None:
                here = counted(
                    placements, value.shape, f"module constraint {glob!r} on {node.name}"
                )
                before = found.setdefault((given, output), here)
                if before != here:
                    raise ConfigError(
                        f"module constraint {glob!r}: {here} for {node.name}, which another "
                        f"module constraint gives {before}. Remove one of them"
                    )
                matched = True
        if not matched:
            known = sorted(set(paths.values()) - {""})
            raise ConfigError(
                f"no module {glob!r} gives a tensor to others{did_you_mean(glob, known)}"
            )
    return found


def fixed_by_name(joint: JointGraph, draft: Draft, constraints: Constraints) -> Fixed:
    """The nodes and parameters that a constraint names.

    Raises:
        ConfigError: there is none of that name.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    of_parameter = {
        port.name: nodes[name]
        for name, port in joint.placeholders.items()
        if port.kind == "parameter"
    }
    found: Fixed = {}
    for name, placements in constraints.nodes.items():
        node = of_parameter.get(name, nodes.get(name))
        if node is None or node.name not in draft.group_of:
            near = did_you_mean(name, [*draft.group_of, *of_parameter])
            raise ConfigError(f"no node or parameter {name!r} in the captured graph{near}")
        found[node, 0] = tuple(placements)
    return found


def _path(joint: JointGraph, node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return module_path(stack, prefix=joint.module_prefix)


def instance_of(glob: str, path: str) -> str | None:
    """The module on the way to `path` that `glob` names; None where there is none."""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        if module_matches(glob, ".".join(parts[:end])):
            return ".".join(parts[:end])
    return None


def fixed_in_model(joint: JointGraph, mesh_shape: tuple[int, ...]) -> Fixed:
    """Where `with_sharding_constraint` stands, with its placements.

    Raises:
        ConfigError: they do not fit the mesh or the shape.
    """
    found: Fixed = {}
    for node in joint.module.graph.nodes:
        told = placed_of(node)
        if told is None:
            continue
        placements, shape = parse_placements(told[0]), node.meta["val"].shape
        where = f"with_sharding_constraint at {told[1] or 'an unknown line'}"
        if len(placements) != len(mesh_shape):
            raise ConfigError(
                f"{where}: {placements} has {len(placements)} entries, and the mesh {mesh_shape} "
                f"{len(mesh_shape)} axes: give one placement for each"
            )
        placements = counted(placements, shape, where)
        if even_local_shape(shape, placements, mesh_shape) is None:
            raise ConfigError(
                f"{where}: {placements} does not cut {tuple(shape)} into equal parts on a mesh of shape "
                f"{mesh_shape}. Shard a dim that the axis divides, or replicate it"
            )
        found[node, 0] = placements
    return found


def fix(draft: Draft, fixed: Fixed, whose: str) -> None:
    """Leave nodes the options alone that give what is fixed.

    Raises:
        ConfigError: one has none.
    """
    for (node, output), placements in fixed.items():
        group = draft.group_of[node.name]
        options = draft.options[group]
        kept = tuple(o for o in options if o.outputs and o.outputs[output] == placements)
        if not kept:
            possible = list(dict.fromkeys(str(o.outputs[output]) for o in options if o.outputs))
            told = placed_of(node)
            where = f" at {told[1]}" if told is not None else ""
            raise ConfigError(
                f"{whose}{where}: {node.name} ({node.target}) cannot give {placements}; its placements "
                f"are {', '.join(possible)}"
            )
        draft.options[group] = kept
