"""Nodes told apart by what they hold: parameters and their gradients, activations."""

from __future__ import annotations

import torch

from ..capture.joint import JointGraph

_aten = torch.ops.aten
CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
PLAIN_VIEWS = (_aten.t.default, _aten.transpose.int, _aten.view.default, _aten.permute.default)


def activation_nodes(joint: JointGraph) -> set[torch.fx.Node]:
    """Operators that read, directly or not, an input or a tangent."""
    found: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "placeholder":
            if joint.placeholders[node.name].kind in ("input", "tangent"):
                found.add(node)
        elif any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def parameter_casts(joint: JointGraph) -> set[torch.fx.Node]:
    """Casts that read a parameter, or give its gradient, through casts only: they may be uneven."""
    found: set[torch.fx.Node] = set()
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and node.target in CASTS:
            source = node.args[0]
            is_parameter = (
                source.op == "placeholder" and joint.placeholders[source.name].kind == "parameter"
            )
            if is_parameter or source in found:
                found.add(node)
    for _, node in _gradients(joint):
        while node.target in CASTS:
            found.add(node)
            node = node.args[0]
    return found


FORWARD, BACKWARD = 0, 1


class ParameterChains:
    """Which reads bring parameters, alone, or their gradients, into place, and on which side."""

    def __init__(self, joint: JointGraph) -> None:
        self.held: set[torch.fx.Node] = set()  # a parameter, through operators of one input
        forward: list[torch.fx.Node] = []
        for node in joint.module.graph.nodes:
            if node.op == "placeholder":
                holds = joint.placeholders[node.name].kind == "parameter"
            else:
                reads = node.all_input_nodes
                holds = node.op == "call_function" and len(reads) == 1 and reads[0] in self.held
            if holds:
                self.held.add(node)
                if not is_backward(node):
                    forward.append(node)
        self.twice: set[torch.fx.Node] = set()  # of these in forward, what backward needs again
        for node in reversed(forward):
            if any(is_backward(u) or u in self.twice for u in node.users if u.op != "output"):
                self.twice.add(node)
        self.gradients = gradient_chains(joint).keys()

    def gathers(
        self, leaf: torch.fx.Node, reader: torch.fx.Node | None, again: bool
    ) -> tuple[tuple[int, int], ...]:
        """(which gather, stream) of a read; readers share a gather, and what is no gather has stream -1.

        Args:
            again: whether backward gathers parameters for itself; else it keeps what forward has.
        """
        if leaf in self.gradients:
            return ((BACKWARD, BACKWARD),)
        if leaf not in self.held:
            return ((FORWARD, -1),)
        if is_backward(leaf):
            return ((BACKWARD, BACKWARD),)
        if not again:
            return ((FORWARD, FORWARD),)
        if reader is not None and is_backward(reader):
            return ((BACKWARD, BACKWARD),)
        if reader in self.twice:  # backward goes this way again
            return ((FORWARD, FORWARD), (BACKWARD, BACKWARD))
        return ((FORWARD, FORWARD),)


def gradient_chains(joint: JointGraph) -> dict[torch.fx.Node, str]:
    """Nodes that hold the gradient of a parameter, and its name: from what computes it to what leaves.

    A parameter that is read in several places has a gradient from each, which are added up. What is
    larger than the gradient is not one: the sum over a batch that gives a bias its gradient reads an
    activation.
    """
    found: dict[torch.fx.Node, str] = {}
    for name, result in _gradients(joint):
        stack = [result]
        while stack:
            node = stack.pop()
            if node.op == "call_function" and node not in found:
                found[node] = name
                stack += _held_by(node)
    return found


def _held_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What a gradient is made of that is one itself."""
    sources = node.all_input_nodes
    if len(sources) > 1 and node.target is not _aten.add.Tensor:
        return []
    return [s for s in sources if len(s.users) == 1 and _as_large(s, node)]


def _gradients(joint: JointGraph) -> list[tuple[str, torch.fx.Node]]:
    """(user name of the parameter, result) of each gradient."""
    results = joint.module.graph.output_node().args[0]
    return [
        (port.name, result)
        for port, result in zip(joint.results, results, strict=True)
        if port is not None and port.kind == "gradient" and isinstance(result, torch.fx.Node)
    ]


def _as_large(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.numel() == b.numel()


def is_backward(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def reduced_late(
    joint: JointGraph, dtype: torch.dtype | None
) -> set[tuple[torch.fx.Node, torch.fx.Node]]:
    """Edges of gradient chains in front of the cast to `dtype`: a Partial must stay one there."""
    found: set[tuple[torch.fx.Node, torch.fx.Node]] = set()
    stack = [(result, False) for _, result in _gradients(joint)] if dtype is not None else []
    while stack:
        reader, cast = stack.pop()
        if reader.target not in (*CASTS, *PLAIN_VIEWS, _aten.add.Tensor):
            continue
        cast = cast or reader.meta["val"].dtype == dtype
        for leaf in (s for s in reader.all_input_nodes if _as_large(s, reader)):
            if cast and leaf.meta["val"].dtype != dtype:
                found.add((leaf, reader))
            stack.append((leaf, cast))
    return found
