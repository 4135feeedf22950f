"""From a joint graph and constraints to the cheapest `ShardingPlan`.

The search fixes what the user fixed, asks `options` for what each operator can do, prices moves with
`costs`, and hands the integer program of `formulation` to the solver. See there for the program.

Ties between ports: the gradient of a parameter leaves placed as the parameter, a mutated buffer as
the buffer, the gradient of an input as the input, and a tangent arrives placed as its output, with
Partial replaced by Replicate.
"""

from __future__ import annotations

import difflib
import logging
import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..capture.joint import JointGraph, Port
from ..errors import ConfigError, InfeasibleError
from ..graph.devices import DeviceSpec, Topology
from .constraints import Constraints
from .costs import RedistributionCosts, local_bytes
from .formulation import Edge, Problem, evaluate, given, solve, wanted
from .options import (
    Option,
    OptionFinder,
    divides,
    even_local_shape,
    free_placements,
    leaves_of,
    outputs_of,
)
from .plan import Choice, Placements, ShardingPlan

_log = logging.getLogger("autop_ac")
_TIE_BREAK = 1e-3  # of the time to write the local outputs once
_SPREAD = 4.0  # latencies that an operator on activations costs where it is not spread
_aten = torch.ops.aten
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_PLAIN_VIEWS = (_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.permute.default)


def search(
    joint: JointGraph,
    mesh: DeviceMesh,
    constraints: Constraints,
    *,
    device: DeviceSpec,
    topology: Topology,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    time_limit_s: float = 60.0,
    gap: float = 0.001,
) -> ShardingPlan:
    """The plan with the least predicted seconds of one step that meets the constraints.

    Args:
        joint: graph on global shapes.
        mesh: devices.
        constraints: see `Constraints`.
        device, topology: what the times are predicted for.
        reduce_dtype: dtype in which gradients of parameters are summed, where the graph casts them
            to it; None: in whichever is cheaper.
        reshard_after_forward: whether parameters are gathered a second time for backward.
        time_limit_s: of the solver.
        gap: relative distance to the best plan at which the solver may stop.

    Raises:
        ConfigError: a constraint does not fit the graph.
        InfeasibleError: no plan meets all constraints; the message names those in conflict.
        SolverError: the solver found no plan in time.
    """
    if len(topology.link_bandwidth) != mesh.ndim:
        raise ConfigError(
            f"topology describes {len(topology.link_bandwidth)} axes, the mesh has {mesh.ndim} of "
            f"shape {tuple(mesh.shape)}"
        )
    started = time.monotonic()
    settings = _Settings(mesh, device, topology, reduce_dtype, reshard_after_forward)
    built = build_problem(joint, constraints, settings)
    found = solve(built.problem, time_limit_s=time_limit_s, gap=gap)
    if found is None:
        raise _why_infeasible(joint, constraints, settings, time_limit_s)
    chosen, reached = found
    evaluate(built.problem, chosen)
    _log.info("sharding search: %d groups, %.2f s", len(chosen), time.monotonic() - started)
    return _plan_of(joint, mesh, built, chosen, reached)


@dataclass(frozen=True)
class _Settings:
    mesh: DeviceMesh
    device: DeviceSpec
    topology: Topology
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)


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


@dataclass
class _Draft:
    """Groups as they are collected, in graph order."""

    names: list[str] = field(default_factory=list)
    options: list[tuple[Option, ...]] = field(default_factory=list)
    nodes: list[torch.fx.Node | None] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, options: Iterable[Option], node: torch.fx.Node | None = None) -> int:
        self.names.append(name)
        self.options.append(tuple(options))
        self.nodes.append(node)
        self.group_of[name] = len(self.names) - 1
        return len(self.names) - 1


# ---------------------------------------------------------------- the problem


def build_problem(joint: JointGraph, constraints: Constraints, settings: _Settings) -> Built:
    """The integer program's data: groups, options, edges, ties, memory."""
    graph = joint.module.graph
    inputs, outputs = _port_placements(joint, constraints, settings.shape)
    finder = OptionFinder(settings.mesh, settings.device)
    uneven_chain = _parameter_casts(joint)
    draft = _Draft()
    for node in graph.nodes:
        if node.op == "placeholder":
            port = joint.placeholders[node.name]
            draft.add(node.name, _placeholder_options(node, port, inputs, settings.shape), node)
        elif node.op == "get_attr":
            value = getattr(joint.module, str(node.target), None)
            if isinstance(value, torch.Tensor):
                node.meta.setdefault("val", value)
                draft.add(node.name, [_placed(_replicated(settings.shape), value, settings)], node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            options = finder.options(node)
            if node in uneven_chain:
                options = (*options, *_uneven_casts(node, options, settings))
            draft.add(node.name, options, node)
    results = _result_groups(joint, draft, outputs, settings.shape)
    smallest = {g: min(o.output_bytes for o in options) for g, options in enumerate(draft.options)}
    _fix_nodes(joint, draft, constraints)
    _drop_unreachable(draft)
    edges = _edges(joint, draft, results, settings)
    memory, low, high = _parameter_memory(joint, draft, constraints, smallest)
    spread_s = _SPREAD * max(settings.topology.latency_s)
    activations = _activations(joint)
    problem = Problem(
        names=tuple(draft.names),
        options=tuple(draft.options),
        option_s=tuple(
            _seconds(
                options, node, joint, settings.device, spread_s if node in activations else 0.0
            )
            for options, node in zip(draft.options, draft.nodes, strict=True)
        ),
        edges=edges,
        ties=_tangent_ties(joint, draft, results),
        memory=memory,
        memory_low=low,
        memory_high=high,
    )
    slots = tuple(r for r in results if r is not None)
    notes = (*finder.notes, *_default_notes(constraints, inputs, settings.shape))
    return Built(problem, dict(draft.group_of), slots, notes)


def _default_notes(
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


def _activations(joint: JointGraph) -> set[torch.fx.Node]:
    """Operators that read, directly or not, an input or a tangent."""
    found: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            if joint.placeholders[node.name].kind in ("input", "tangent"):
                found.add(node)
        elif any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _replicated(mesh_shape: Sequence[int]) -> Placements:
    return (Replicate(),) * len(mesh_shape)


def _placed(placements: Placements, value: torch.Tensor, settings: _Settings) -> Option:
    size = local_bytes(value.shape, value.element_size(), placements, settings.shape)
    return Option((), (placements,), 0.0, size)


def _placeholder_options(
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
        allowed = [_replicated(mesh_shape)]
    else:
        allowed = list(free_placements(value.shape, mesh_shape, uneven=port.kind == "parameter"))
    return [
        Option((), (p,), 0.0, local_bytes(value.shape, value.element_size(), p, mesh_shape))
        for p in allowed
        if p is not None
    ]


def _parameter_casts(joint: JointGraph) -> set[torch.fx.Node]:
    """Casts that read a parameter, or give its gradient, through casts only: they may be uneven."""
    found: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and node.target in _CASTS:
            source = node.args[0]
            is_parameter = (
                source.op == "placeholder" and joint.placeholders[source.name].kind == "parameter"
            )
            if is_parameter or source in found:
                found.add(node)
    results = joint.module.graph.output_node().args[0]
    for port, result in zip(joint.results, results, strict=True):
        node = result
        while port is not None and port.kind == "gradient" and node.target in _CASTS:
            found.add(node)
            node = node.args[0]
    return found


def _uneven_casts(
    node: torch.fx.Node, options: Sequence[Option], settings: _Settings
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


def _result_groups(
    joint: JointGraph,
    draft: _Draft,
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
            allowed = [_replicated(mesh_shape)]
        groups.append((draft.add(f"result {i}", [Option((p,), ()) for p in allowed]), 0))
    return groups


def _fix_nodes(joint: JointGraph, draft: _Draft, constraints: Constraints) -> None:
    by_parameter = {
        port.name: name for name, port in joint.placeholders.items() if port.kind == "parameter"
    }
    for name, placements in constraints.nodes.items():
        group = draft.group_of.get(by_parameter.get(name, name))
        if group is None:
            near = difflib.get_close_matches(name, [*draft.group_of, *by_parameter], n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"no node or parameter {name!r} in the captured graph{hint}")
        kept = tuple(
            o for o in draft.options[group] if o.outputs and o.outputs[0] == tuple(placements)
        )
        if not kept:
            possible = list(dict.fromkeys(str(o.outputs[0]) for o in draft.options[group]))
            raise ConfigError(
                f"{name!r} cannot give {tuple(placements)}; its placements are "
                f"{', '.join(possible)}"
            )
        draft.options[group] = kept


def _drop_unreachable(draft: _Draft) -> None:
    """Drop options that read a Partial which no producer can give, and dominated options.

    Nothing becomes Partial by a move, so an option that wants one needs a producer that gives it.
    Groups are in graph order, so one pass is enough.
    """
    for group, node in enumerate(draft.nodes):
        if node is None or node.op != "call_function":
            continue
        kept = draft.options[group]
        for slot, leaf in enumerate(leaves_of(node)):
            source = _source(draft, leaf)
            if source is None:
                continue
            available = {o.outputs[source[1]] for o in draft.options[source[0]]}
            kept = tuple(
                o for o in kept
                if o.inputs[slot] is None or _may_come(available, o.inputs[slot])
            )  # fmt: skip
        best: dict[Any, Option] = {}
        for option in kept:
            key = (option.inputs, option.outputs)
            if key not in best or option.compute_s < best[key].compute_s:
                best[key] = option
        draft.options[group] = tuple(best.values())


def _may_come(available: set[Placements | None], target: Placements | None) -> bool:
    assert target is not None
    axes = [i for i, q in enumerate(target) if isinstance(q, Partial)]
    return not axes or any(
        p is not None and all(p[i] == target[i] for i in axes) for p in available
    )


def _source(draft: _Draft, leaf: torch.fx.Node) -> tuple[int, int] | None:
    """(group, output) that gives a leaf, getitem looked through; None where it is no tensor."""
    index = 0
    if leaf.op == "call_function" and leaf.target is operator.getitem:
        leaf, index = leaf.args[0], leaf.args[1]
    group = draft.group_of.get(leaf.name)
    if group is None or outputs_of(leaf)[index] is None:
        return None
    return group, index


# ---------------------------------------------------------------- edges


def _edges(
    joint: JointGraph,
    draft: _Draft,
    results: Sequence[tuple[int, int] | None],
    settings: _Settings,
) -> tuple[Edge, ...]:
    prices = RedistributionCosts(
        settings.shape, settings.topology, settings.device.memory_bandwidth
    )
    twice = _gathered_twice(joint) if settings.reshard_after_forward else set()
    late = _reduced_late(joint, settings.reduce_dtype)
    numbers: dict[tuple[int, int], int] = {}
    edges = []

    def add(leaf: torch.fx.Node, reader: torch.fx.Node | None, consumer: int, slot: int) -> None:
        source = _source(draft, leaf)
        if source is None:
            return
        value = leaf.meta["val"]
        seconds = _pairs(
            draft, source, (consumer, slot), value, prices,
            factor=2.0 if leaf in twice else 1.0,
            keep_partial=(leaf, reader) in late,
            follow=settings.mesh.ndim > 1 and reader is not None and _follows(reader, value),
        )  # fmt: skip
        number = numbers.setdefault(source, len(numbers))
        edges.append(Edge(number, *source, consumer, slot, seconds))

    for group, node in enumerate(draft.nodes):
        if node is not None and node.op == "call_function":
            for slot, leaf in enumerate(leaves_of(node)):
                add(leaf, node, group, slot)
    for where, result in zip(results, joint.module.graph.output_node().args[0], strict=True):
        if where is not None:
            add(result, None, *where)
    return tuple(edges)


def _pairs(
    draft: _Draft,
    source: tuple[int, int],
    reader: tuple[int, int],
    value: torch.Tensor,
    prices: RedistributionCosts,
    *,
    factor: float,
    keep_partial: bool,
    follow: bool,
) -> dict[tuple[Placements, Placements], float]:
    """Prices of the moves that an edge may make.

    With `follow`, a value is moved in front of a one-input operator only where the operator cannot
    take it as it is: moving its result costs the same and leaves fewer variables.
    """
    sources = dict.fromkeys(given(o, source[1]) for o in draft.options[source[0]])
    targets = dict.fromkeys(wanted(o, reader[1]) for o in draft.options[reader[0]])
    seconds = {}
    for p in sources:
        for q in targets:
            if p != q and follow and p in targets:
                continue
            leaves = any(isinstance(a, Partial) and a != b for a, b in zip(p, q, strict=True))
            if keep_partial and leaves:
                continue
            price = prices.seconds(value, p, q)
            if price is not None:
                seconds[p, q] = price * factor
    return seconds


def _follows(node: torch.fx.Node, value: torch.Tensor) -> bool:
    outputs = [v for v in outputs_of(node) if v is not None]
    out_bytes = sum(v.numel() * v.element_size() for v in outputs)
    return len(leaves_of(node)) == 1 and out_bytes <= value.numel() * value.element_size()


def _gathered_twice(joint: JointGraph) -> set[torch.fx.Node]:
    """Forward nodes that hold a parameter, alone, and that backward reads too."""
    chain: list[torch.fx.Node] = []
    members: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            holds = joint.placeholders[node.name].kind == "parameter"
        else:
            reads = node.all_input_nodes
            holds = node.op == "call_function" and len(reads) == 1 and reads[0] in members
        if holds and not _is_backward(node):
            chain.append(node)
            members.add(node)
    twice: set[torch.fx.Node] = set()
    for node in reversed(chain):
        if any(_is_backward(u) or u in twice for u in node.users if u.op != "output"):
            twice.add(node)
    return twice


def _is_backward(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _reduced_late(
    joint: JointGraph, dtype: torch.dtype | None
) -> set[tuple[torch.fx.Node, torch.fx.Node]]:
    """Edges of gradient chains in front of the cast to `dtype`: a Partial must stay one there."""
    found: set[tuple[torch.fx.Node, torch.fx.Node]] = set()
    results = joint.module.graph.output_node().args[0]
    for port, result in zip(joint.results, results, strict=True):
        if dtype is None or port is None or port.kind != "gradient":
            continue
        chain = [result]
        while chain[-1].target in (*_CASTS, *_PLAIN_VIEWS):
            chain.append(chain[-1].args[0])
        for reader, leaf in zip(chain, chain[1:], strict=False):
            after = chain[: chain.index(leaf)]
            cast_later = any(n.meta["val"].dtype == dtype for n in after)
            if cast_later and leaf.meta["val"].dtype != dtype:
                found.add((leaf, reader))
    return found


# ---------------------------------------------------------------- ports and memory


def _port_placements(
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
            else _replicated(mesh_shape)
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


def _tangent_ties(
    joint: JointGraph, draft: _Draft, results: Sequence[tuple[int, int] | None]
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


def _parameter_memory(
    joint: JointGraph, draft: _Draft, constraints: Constraints, smallest: dict[int, int]
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], float | None, float | None]:
    """Bytes per option of each parameter, and the bounds on their sum.

    The upper bound allows each parameter the least that it can take, where that is above its share:
    a bias of 3 elements on 8 devices cannot be cut in eight.
    """
    memory, total, slack = [], 0, 0.0
    high, low = constraints.parameter_high, constraints.parameter_low
    for name, port in joint.placeholders.items():
        if port.kind != "parameter":
            continue
        group = draft.group_of[name]
        node = draft.nodes[group]
        assert node is not None
        value = node.meta["val"]
        size = value.numel() * value.element_size()
        sizes = tuple(o.output_bytes for o in draft.options[group])
        memory.append((group, sizes))
        total += size
        if high is not None:
            slack += max(0.0, smallest[group] - high * size)
    upper = None if high is None else high * total + slack
    lower = None if low is None else low * total
    return tuple(memory), lower, upper


# ---------------------------------------------------------------- the outcome


def _why_infeasible(
    joint: JointGraph, constraints: Constraints, settings: _Settings, time_limit_s: float
) -> InfeasibleError:
    """Solve again without each kind of constraint in turn: those that help are in conflict."""
    no_memory = replace(constraints, parameter_low=None, parameter_high=None)
    many = 1 << 16
    relaxed = {
        "inputs": replace(constraints, inputs=(None,) * many),
        "outputs": replace(constraints, outputs=(None,) * many),
        "parameter memory": no_memory,
        "nodes": replace(constraints, nodes={}),
    }
    active = {
        "inputs": constraints.inputs is not None,
        "outputs": constraints.outputs is not None,
        "parameter memory": no_memory != constraints,
        "nodes": bool(constraints.nodes),
    }
    helpful = []
    for name, weaker in relaxed.items():
        if not active[name]:
            continue
        weaker = _fit_lengths(joint, weaker, many)
        problem = build_problem(joint, weaker, settings).problem
        if solve(problem, time_limit_s=time_limit_s, gap=1.0) is not None:
            helpful.append(name)
    named = " and ".join(helpful) or ", ".join(n for n, on in active.items() if on) or "none given"
    budget = smallest = None
    text = f"no sharding plan meets all constraints; in conflict: {named}."
    if "parameter memory" in helpful:
        problem = build_problem(joint, no_memory, settings).problem
        total = sum(
            n.meta["val"].numel() * n.meta["val"].element_size()
            for n in joint.module.graph.nodes
            if n.op == "placeholder" and joint.placeholders[n.name].kind == "parameter"
        )
        smallest = sum(min(sizes) for _, sizes in problem.memory)
        high = constraints.parameter_high
        budget = None if high is None else int(high * total)
        text += (
            f" Parameters take {total} bytes whole and at least {smallest} per device; asked for: low="
            f"{constraints.parameter_low}, high={high}."
        )
    return InfeasibleError(
        f"{text} Drop or weaken one of them", budget_bytes=budget, smallest_bytes=smallest
    )


def _fit_lengths(joint: JointGraph, constraints: Constraints, many: int) -> Constraints:
    ins = [p.index for p in joint.placeholders.values() if p.kind == "input"]
    outs = [p.index for p in joint.results if p is not None and p.kind == "output"]
    if constraints.inputs is not None and len(constraints.inputs) == many:
        constraints = replace(constraints, inputs=(None,) * (max(ins, default=-1) + 1))
    if constraints.outputs is not None and len(constraints.outputs) == many:
        constraints = replace(constraints, outputs=(None,) * (max(outs, default=-1) + 1))
    return constraints


def _plan_of(
    joint: JointGraph, mesh: DeviceMesh, built: Built, chosen: Sequence[int], gap: float
) -> ShardingPlan:
    problem = built.problem
    picked = [options[i] for options, i in zip(problem.options, chosen, strict=True)]
    moved: set[tuple[int, Placements]] = set()
    seconds = [0.0] * len(picked)
    for edge in problem.edges:
        source = given(picked[edge.producer], edge.output)
        target = wanted(picked[edge.consumer], edge.slot)
        if (edge.value, target) not in moved:
            moved.add((edge.value, target))
            place = edge.consumer if edge.slot >= 0 else edge.producer
            seconds[place] += edge.seconds[source, target]
    choices = {}
    for name, group in built.group_of.items():
        if not name.startswith("result "):
            option = picked[group]
            choices[name] = Choice(
                name, option.inputs, option.outputs, option.compute_s, seconds[group]
            )
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
        objective_s=sum(c.compute_s + c.redistribute_s for c in choices.values()),
        gap=gap,
        notes=built.notes,
    )


def _wanted_or_none(option: Option, slot: int) -> Placements | None:
    return option.outputs[0] if slot < 0 else option.inputs[slot]
