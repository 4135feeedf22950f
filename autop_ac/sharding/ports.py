"""What the user fixed about inputs and outputs, and what ties the ports of the graph together.

Ties: the gradient of a parameter leaves placed as the parameter, a mutated buffer as the buffer, the
gradient of an input as the input, and a tangent arrives placed as its output, with Partial replaced by
Replicate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..capture.joint import JointGraph
from ..errors import ConfigError
from .constraints import Constraints
from .groups import Draft
from .layout import divides, even_local_shape, free_placements, replicated
from .option import Option
from .plan import Placements


def port_placements(
    joint: JointGraph, constraints: Constraints, mesh_shape: tuple[int, ...]
) -> tuple[dict[int, Placements | None], dict[int, Placements | None]]:
    ins = {
        port.index: node.meta["val"]
        for node in joint.module.graph.nodes
        if node.op == "placeholder" and (port := joint.placeholders[node.name]).kind == "input"
        and isinstance(node.meta.get("val"), torch.Tensor)
    }  # fmt: skip
    results = joint.module.graph.output_node().args[0]
    outs = {
        port.index: result.meta["val"]
        for port, result in zip(joint.results, results, strict=True)
        if port is not None and port.kind == "output"
        and isinstance(result, torch.fx.Node) and isinstance(result.meta.get("val"), torch.Tensor)
    }  # fmt: skip
    first = ins[min(ins)] if ins else None
    batch = first.shape[0] if first is not None and first.dim() else None
    return (
        _resolve("input", constraints.inputs, ins, batch, mesh_shape),
        _resolve("output", constraints.outputs, outs, batch, mesh_shape),
    )


def _resolve(
    kind: str,
    given_placements: Sequence[Placements | None] | None,
    values: dict[int, torch.Tensor],
    batch: int | None,
    mesh_shape: tuple[int, ...],
) -> dict[int, Placements | None]:
    rest: tuple[Placement, ...] = (Replicate(),) * (len(mesh_shape) - 1)
    if given_placements is None:
        sharded = (Shard(0), *rest)
        return {
            index: sharded
            if value.dim() and value.shape[0] == batch and divides(value.shape, sharded, mesh_shape)
            else replicated(mesh_shape)
            for index, value in values.items()
        }
    highest = max(values, default=-1)
    if not highest < len(given_placements) or (values and len(given_placements) > highest + 1):
        shapes = [tuple(v.shape) for v in values.values()]
        raise ConfigError(
            f"{len(given_placements)} {kind} constraints {tuple(given_placements)} for "
            f"{highest + 1} {kind} tensors of shapes {shapes}: give one entry per tensor, None where "
            "it is free"
        )
    resolved: dict[int, Placements | None] = {}
    for index, value in values.items():
        placements = given_placements[index]
        resolved[index] = None if placements is None else tuple(placements)
        if placements is not None:
            _check_port(kind, index, value, tuple(placements), mesh_shape)
    return resolved


def _check_port(
    kind: str, index: int, value: torch.Tensor, placements: Placements, mesh_shape: tuple[int, ...]
) -> None:
    where = f"{kind} {index} of shape {tuple(value.shape)} on a mesh of shape {mesh_shape}"
    if len(placements) != len(mesh_shape):
        raise ConfigError(
            f"{where}: {placements} has {len(placements)} entries, one per mesh axis is needed"
        )
    if kind == "input" and any(isinstance(p, Partial) for p in placements):
        raise ConfigError(f"{where}: {placements}: an input cannot be Partial")
    normal = tuple(p for p in placements if isinstance(p, Shard) and not 0 <= p.dim < value.dim())
    if normal or even_local_shape(value.shape, placements, mesh_shape) is None:
        raise ConfigError(
            f"{where}: {placements} does not cut it into equal parts. Shard a dim that the axis "
            "divides, or replicate it"
        )


def default_notes(
    constraints: Constraints, inputs: dict[int, Placements | None], mesh_shape: tuple[int, ...]
) -> list[str]:
    """A word where the default cannot shard the batch."""
    if constraints.inputs is not None or not inputs or mesh_shape[0] == 1:
        return []
    if any(isinstance(p, Shard) for placements in inputs.values() for p in placements or ()):
        return []
    return [
        f"no input is sharded: dim 0 of the first input is not divided by the {mesh_shape[0]} devices "
        "of the first mesh axis"
    ]


def result_groups(
    joint: JointGraph,
    draft: Draft,
    outputs: dict[int, Placements | None],
    mesh_shape: tuple[int, ...],
) -> list[tuple[int, int] | None]:
    """For each result, the (group, slot) whose placement it is brought to."""
    holder = {
        (port.kind, port.index if port.kind == "input" else port.name): name
        for name, port in joint.placeholders.items()
    }
    groups: list[tuple[int, int] | None] = []
    results = joint.module.graph.output_node().args[0]
    for i, (port, result) in enumerate(zip(joint.results, results, strict=True)):
        if port is None or not isinstance(result, torch.fx.Node):
            groups.append(None)
            continue
        owner = {
            "gradient": ("parameter", port.name),
            "mutation": ("buffer", port.name),
            "input_gradient": ("input", port.index),
        }.get(port.kind)
        if port.kind == "mutation" and owner not in holder:
            owner = next((("input", p.index) for p in joint.placeholders.values()
                          if p.kind == "input" and p.name == port.name), None)  # fmt: skip
        if owner in holder:
            groups.append((draft.group_of[holder[owner]], -1))
            continue
        value = result.meta.get("val")
        if not isinstance(value, torch.Tensor):
            allowed: list[Placements | None] = [None]
        elif port.kind == "output" and outputs.get(port.index) is not None:
            allowed = [outputs[port.index]]
        elif port.kind == "output":
            allowed = list(free_placements(value.shape, mesh_shape))
        else:
            allowed = [replicated(mesh_shape)]
        groups.append((draft.add(f"result {i}", [Option((p,), ()) for p in allowed]), 0))
    return groups


def tangent_ties(
    joint: JointGraph, draft: Draft, results: Sequence[tuple[int, int] | None]
) -> tuple[tuple[int, int], ...]:
    out_group = {
        port.index: where[0]
        for port, where in zip(joint.results, results, strict=True)
        if port is not None and port.kind == "output" and where is not None
    }
    return tuple(
        (draft.group_of[name], out_group[port.index])
        for name, port in joint.placeholders.items()
        if port.kind == "tangent" and port.index in out_group
        and draft.options[draft.group_of[name]][0].outputs[0] is not None
    )  # fmt: skip
