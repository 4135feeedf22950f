"""Placements that the user fixed inside the graph: of nodes, of modules, and where the model says so."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from ..capture.joint import JointGraph
from ..capture.marks import placed_of
from ..capture.names import module_path
from ..errors import ConfigError
from ..placements import parse_placements
from ..policies import module_matches
from .chains import is_backward
from .constraints import Constraints
from .fold import is_tensor_node
from .groups import Draft
from .layout import counted, even_local_shape
from .option import outputs_of
from .plan import Placements


def fixed_by_modules(
    joint: JointGraph, constraints: Constraints
) -> dict[torch.fx.Node, Placements]:
    """What the forward of each constrained module hands to others, with its placements."""
    paths = {n: _path(joint, n) for n in joint.module.graph.nodes if n.op == "call_function"}
    found: dict[torch.fx.Node, Placements] = {}
    for glob, placements in constraints.modules.items():
        matched = False
        for node, path in paths.items():
            module = instance_of(glob, path)
            if module is None or is_backward(node):
                continue
            readers = [u for u in node.users if not is_backward(u)]
            if any(instance_of(glob, paths.get(u, "")) != module for u in readers):
                while not is_tensor_node(node) and node.args[1] == 0:  # getitem
                    node = node.args[0]
                value = outputs_of(node)[0] if is_tensor_node(node) else None
                if value is not None:
                    whose = f"module constraint {glob!r} on {node.name}"
                    here = counted(placements, value.shape, whose)
                    if found.setdefault(node, here) != here:
                        raise ConfigError(
                            f"module constraint {glob!r}: {here} for {node.name}, which another "
                            f"module constraint gives {found[node]}. Remove one of them"
                        )
                    matched = True
        if not matched:
            known = sorted(set(paths.values()) - {""})
            near = difflib.get_close_matches(glob, known, n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"no module {glob!r} gives a tensor to others{hint}")
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


def fixed_in_model(
    joint: JointGraph, mesh_shape: tuple[int, ...]
) -> dict[torch.fx.Node, Placements]:
    """Where `with_sharding_constraint` stands, with its placements.

    Raises:
        ConfigError: they do not fit the mesh or the shape.
    """
    found = {}
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
        found[node] = placements
    return found


def fix(draft: Draft, node: torch.fx.Node, placements: Sequence[object], whose: str) -> None:
    """Leave a node the options alone that give `placements`.

    Raises:
        ConfigError: it has none.
    """
    group = draft.group_of[node.name]
    kept = tuple(o for o in draft.options[group] if o.outputs and o.outputs[0] == tuple(placements))
    if not kept:
        possible = list(dict.fromkeys(str(o.outputs[0]) for o in draft.options[group]))
        raise ConfigError(
            f"{whose}: {node.name} ({node.target}) cannot give {tuple(placements)}; its placements are "
            f"{', '.join(possible)}"
        )
    draft.options[group] = kept
