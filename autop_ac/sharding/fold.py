"""Nodes of repeated layers that share their variables.

Any partition of the nodes into classes whose members have the same options gives a program whose
solutions are valid for the whole graph, priced exactly: members are placed alike, and what a class
costs is counted once per member. A good partition puts corresponding nodes of equal layers together
and leaves apart what differs, so that no better plan is lost. Ours:

- nodes look alike when operator, constants, shapes, side and module path, the numbers in it taken
  out, agree, and so do, `_REACH` steps far, the nodes that they read and that read them; the first
  and the last layer, whose surroundings differ, so keep variables of their own at their ends;
- nodes that look alike in one and the same module (of one layer) are told apart by their order.

Linear in the size of the graph, deterministic. Weakness: where a plan that changes from layer to layer
would be cheaper, it is not found.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..capture.joint import JointGraph
from ..capture.names import module_path

_REACH = 2  # steps; more leaves more variables at both ends of the model, and a longer search
_FEWEST = 3  # layers; of two each is at an end of the model
_HERE = ("node",)  # stands for a node among the constants of an operator


def fold(
    joint: JointGraph, marks: Mapping[torch.fx.Node, Hashable], *, enable: bool = True
) -> dict[torch.fx.Node, torch.fx.Node]:
    """For each node the first node of its class; itself where it is the first.

    Args:
        joint: graph on global shapes.
        marks: facts that keep nodes apart, besides what the graph says.
        enable: False puts each node in a class of its own.
    """
    nodes = [n for n in joint.module.graph.nodes if n.op != "output"]
    if not enable:
        return {node: node for node in nodes}
    places = places_of(joint)
    colours = _looks(joint, nodes, places, marks)
    for _ in range(_REACH):
        colours = _widened(nodes, colours)
    seen: dict[tuple[int, str], int] = defaultdict(int)
    classes: dict[tuple[int, int], list[torch.fx.Node]] = defaultdict(list)
    for node in nodes:
        here = (colours[node], places[node])
        classes[colours[node], seen[here]].append(node)
        seen[here] += 1
    found = {}
    for members in classes.values():
        together = len(members) >= _FEWEST
        found.update({node: members[0] if together else node for node in members})
    return {node: found[node] for node in nodes}


def places_of(joint: JointGraph) -> dict[torch.fx.Node, str]:
    """Module path, or that of the latest input where a node has none (casts, sums of gradients).

    A sum of gradients adds what its own layer gives to what has run through all later layers.
    """
    prefix = joint.module_prefix
    nodes = [n for n in joint.module.graph.nodes if n.op != "output"]
    order = {node: i for i, node in enumerate(nodes)}
    places: dict[torch.fx.Node, str] = {}
    for node in nodes:
        if node.op == "placeholder":
            places[node] = joint.placeholders[node.name].name
            continue
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = module_path(stack, prefix=prefix)
        if not path and node.all_input_nodes:
            path = places[max(node.all_input_nodes, key=order.__getitem__)]
        places[node] = path
    return places


def _pattern(place: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in place.split("."))


def _looks(
    joint: JointGraph,
    nodes: list[torch.fx.Node],
    places: Mapping[torch.fx.Node, str],
    marks: Mapping[torch.fx.Node, Hashable],
) -> dict[torch.fx.Node, int]:
    """A number for how each node looks by itself."""
    results: dict[torch.fx.Node, list[Hashable]] = defaultdict(list)
    outgoing = joint.module.graph.output_node().args[0]
    for port, result in zip(joint.results, outgoing, strict=True):
        if port is not None and isinstance(result, torch.fx.Node):
            named = port.kind in ("gradient", "mutation")
            results[result].append((port.kind, _pattern(port.name) if named else port.index))
    numbers: dict[Hashable, int] = {}
    colours = {}
    for node in nodes:
        if node.op == "placeholder":
            port = joint.placeholders[node.name]
            own: Hashable = (port.kind, port.index)
        elif node.op == "get_attr":
            own = node.name
        else:
            own = (node.target, _constants(node.args), _constants(node.kwargs))
        look = (
            own,
            _pattern(places[node]),
            node.meta.get("partitioner_tag"),
            _value_look(node.meta.get("val")),
            tuple(results[node]) if node in results else (),
            marks.get(node),
        )
        colours[node] = numbers.setdefault(look, len(numbers))
    return colours


def _constants(arg: Any) -> Hashable:
    if isinstance(arg, torch.fx.Node):
        return _HERE
    if isinstance(arg, (tuple, list)):
        return tuple(_constants(a) for a in arg)
    if isinstance(arg, Mapping):
        return tuple((k, _constants(v)) for k, v in arg.items())
    return type(arg), repr(arg)  # 1, 1.0 and True are equal


def _value_look(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_value_look(v) for v in value)
    return repr(value)


def _widened(
    nodes: list[torch.fx.Node], colours: Mapping[torch.fx.Node, int]
) -> dict[torch.fx.Node, int]:
    """Numbers for how nodes look together with those one step away."""
    numbers: dict[Hashable, int] = {}
    readers: dict[torch.fx.Node, list[tuple[int, int]]] = defaultdict(list)
    reads: dict[torch.fx.Node, tuple[int, ...]] = {}
    for node in nodes:
        # all_input_nodes leaves out repetitions, which the operator's own constants show
        sources = node.all_input_nodes
        reads[node] = tuple(colours[s] for s in sources)
        for slot, source in enumerate(sources):
            readers[source].append((slot, colours[node]))
    wide = {}
    for node in nodes:
        # a set: how often equal layers read a shared table says nothing about the layer
        look = (colours[node], reads[node], frozenset(readers[node]))
        wide[node] = numbers.setdefault(look, len(numbers))
    return wide


def is_tensor_node(node: torch.fx.Node) -> bool:
    """Whether a node has placements of its own (getitem has those of what it reads)."""
    return node.op == "call_function" and node.target is not operator.getitem
