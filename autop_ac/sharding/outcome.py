"""The solver's choice as a `ShardingPlan`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from ..capture.joint import JointGraph
from .build import Built
from .formulation import hidden_s, move_on
from .option import Option
from .plan import Choice, Placements, ShardingPlan


def plan_of(
    joint: JointGraph, mesh: DeviceMesh, built: Built, chosen: Sequence[int], gap: float
) -> ShardingPlan:
    problem = built.problem
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    seconds = [0.0] * len(picked)
    for value in problem.values:
        moved: set[Placements] = set()
        for edge in (problem.edges[number] for number in value.edges):
            target, price = move_on(problem, edge, picked)
            if target not in moved:
                moved.add(target)
                place = edge.consumer if edge.slot >= 0 else edge.producer
                seconds[place] += value.count * value.weight * price
    choices = {}
    for name, group in built.group_of.items():
        if not name.startswith("result "):
            option = picked[group]
            share = seconds[group] / problem.counts[group]
            choices[name] = Choice(name, option.inputs, option.outputs, option.compute_s, share)
    hidden = hidden_s(problem, chosen)
    output = joint.module.graph.output_node()
    brought = tuple(
        None if (option := picked[group]).outputs[:1] == (None,) else _wanted_or_none(option, slot)
        for group, slot in built.result_groups
    )
    outwards = sum(seconds[g] for n, g in built.group_of.items() if n.startswith("result "))
    choices[output.name] = Choice(output.name, brought, (), 0.0, outwards)
    parameters = {
        port.name: placements
        for name, port in joint.placeholders.items()
        if port.kind in ("parameter", "buffer")
        and (placements := choices[name].outputs[0]) is not None
    }
    return ShardingPlan(
        mesh_shape=tuple(mesh.shape),
        axis_names=tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(mesh.ndim))),
        choices=choices,
        parameters=parameters,
        objective_s=sum(c.compute_s + c.redistribute_s for c in choices.values()) - hidden,
        hidden_s=hidden,
        gap=gap,
        notes=built.notes,
    )


def _wanted_or_none(option: Option, slot: int) -> Placements | None:
    return option.outputs[0] if slot < 0 else option.inputs[slot]
