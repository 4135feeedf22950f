"""From a joint graph and constraints to the data of the integer program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor.placement_types import Shard

from ..capture.joint import JointGraph
from ..graph.devices import DeviceSpec
from .chains import activation_nodes, parameter_casts
from .constraints import Constraints
from .edges import collect_edges
from .fixed import fix, fixed_by_modules, fixed_by_name, fixed_in_model
from .fold import fold, is_tensor_node
from .formulation import Problem
from .groups import (
    Draft,
    Settings,
    drop_unreachable,
    placed,
    placeholder_options,
    uneven_casts,
)
from .layout import replicated
from .limits import limits_of, worth_s
from .option import Option
from .options import OptionFinder
from .ports import default_notes, port_placements, result_groups, tangent_ties

_TIE_BREAK = 1e-3  # of the time to write the local outputs once
_SPREAD = 4.0  # latencies that an operator on activations costs where it is not spread


@dataclass(frozen=True)
class Built:
    """The problem and what its groups stand for.

    Attributes:
        problem: for the solver.
        group_of: group by node name.
        result_groups: for each result that is a tensor: (group, slot) that says how it is brought out.
        notes: warnings met on the way.
    """

    problem: Problem
    group_of: dict[str, int]
    result_groups: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def build_problem(joint: JointGraph, constraints: Constraints, settings: Settings) -> Built:
    """The integer program's data: groups, options, edges, ties, memory."""
    inputs, outputs = port_placements(joint, constraints, settings.shape)
    finder = OptionFinder(settings.mesh, settings.device, settings.topology)
    uneven_chain, activations = parameter_casts(joint), activation_nodes(joint)
    marks: dict[torch.fx.Node, Hashable] = {
        node: (node in uneven_chain, node in activations, _own_mark(node, joint, constraints))
        for node in joint.module.graph.nodes
    }
    draft = Draft()
    in_model = fixed_in_model(joint, settings.shape)
    by_module = fixed_by_modules(joint, constraints)
    for (node, output), placements in (*by_module.items(), *in_model.items()):
        # equal layers with equal constraints stay together
        marks[node] = (marks[node], output, placements)
    for node, first in fold(joint, marks, enable=settings.fold).items():
        if first is not node:
            if first.name in draft.group_of:
                draft.join(node.name, draft.group_of[first.name])
        elif node.op == "placeholder":
            port = joint.placeholders[node.name]
            options = placeholder_options(node, port, inputs, settings.shape)
            if port.kind == "parameter":
                options = _whole_on(options, constraints.whole_on)
            draft.add(node.name, options, node)
        elif node.op == "get_attr":
            value = getattr(joint.module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                node.meta.setdefault("val", value)
                draft.add(node.name, [placed(replicated(settings.shape), value, settings)], node)
        elif is_tensor_node(node):
            found = finder.options(node)
            if node in uneven_chain:
                found = (*found, *uneven_casts(node, found, settings))
            draft.add(node.name, found, node)
    results = result_groups(joint, draft, outputs, settings.shape)
    smallest = {g: min(o.output_bytes for o in options) for g, options in enumerate(draft.options)}
    fix(draft, fixed_by_name(joint, draft, constraints), "constraint on a node")
    fix(draft, by_module, "module constraint")
    fix(draft, in_model, "with_sharding_constraint")
    drop_unreachable(draft, joint)
    edges, values, streams = collect_edges(joint, draft, results, settings)
    limits = limits_of(joint, draft, constraints, smallest, settings)
    spread_s = _SPREAD * max(settings.topology.latency_s)
    problem = Problem(
        names=tuple(draft.names),
        options=tuple(draft.options),
        option_s=tuple(
            _seconds(
                options, node, joint, settings.device, spread_s if node in activations else 0.0
            )
            for options, node in zip(draft.options, draft.nodes, strict=True)
        ),
        counts=tuple(draft.counts),
        edges=edges,
        values=values,
        ties=tangent_ties(joint, draft, results),
        limits=limits,
        streams=streams,
    )
    problem = replace(problem, option_s=worth_s(problem, settings.device))
    slots = tuple(r for r in results if r is not None)
    notes = (*finder.notes, *default_notes(constraints, inputs, settings.shape))
    return Built(problem, dict(draft.group_of), slots, notes)


def _whole_on(options: list[Option], axes: tuple[int, ...]) -> list[Option]:
    placed = [(o, o.outputs[0] or ()) for o in options]
    return [o for o, p in placed if not any(isinstance(p[a], Shard) for a in axes)]


def _own_mark(node: torch.fx.Node, joint: JointGraph, constraints: Constraints) -> Hashable:
    """Where the user has placed the node: only those placed alike stand together."""
    port = joint.placeholders.get(node.name)
    name = port.name if port is not None and port.name in constraints.nodes else node.name
    return constraints.nodes.get(name)


def _seconds(
    options: Sequence[Option],
    node: torch.fx.Node | None,
    joint: JointGraph,
    device: DeviceSpec,
    spread_s: float,
) -> tuple[float, ...]:
    """Seconds of each option with what decides where times are close.

    Less memory; parameters sharded on dim 0 (elements of a shard of another dim do not lie together,
    which costs a copy when it is gathered); and work on activations that is spread over the devices:
    `spread_s` times the share of the work that one device does. Without it a toy model would be
    computed whole on every device, as its time is that of the collectives alone.
    """
    whole_s = max((o.compute_s for o in options), default=0.0)
    parameter = (
        node is not None and node.op == "placeholder"
        and joint.placeholders[node.name].kind == "parameter"
    )  # fmt: skip
    found = []
    for option in options:
        write_s = option.output_bytes / device.memory_bandwidth
        seconds = option.compute_s + _TIE_BREAK * write_s
        if parameter and option.outputs[0]:
            seconds += write_s * sum(isinstance(p, Shard) and p.dim > 0 for p in option.outputs[0])
        if whole_s > 0:
            seconds += spread_s * option.compute_s / whole_s
        found.append(seconds)
    return tuple(found)
