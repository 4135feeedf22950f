"""The captured forward values as a frozen list, free of FX: what selectors and rules choose from."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..capture import batch_norm
from ..capture.local_map import enter, leave
from ..capture.marks import names_of
from ..capture.names import block_instance, module_calls, module_path, source_line
from ..policies import Selector


@dataclass(frozen=True, slots=True)
class Captured:
    """One forward value of the captured graph.

    Attributes:
        name: the node's name.
        op: operator as text; ``"aten.batch_norm.default"`` for each that a batch norm is made of.
        module: the user's module path.
        block: the instance of a repeated block that it is in, in which `every` counts.
        names: what `checkpoint_name` called it.
        base: name of the node that holds its memory: its own, what it views or is an item of, or ``""``
            where that is an input of the graph.
        source: ``"file.py:12"`` of the user's line, or ``""``.
        calls: by path of the modules around it, the outermost first, the call that it is in:
            ``("layers.3", "layers.3@1")`` in the second.
        reads: names of the nodes that hold the memory of what it reads, inputs of the graph left out.
    """

    name: str
    op: str
    module: str = ""
    block: str = ""
    names: tuple[str, ...] = ()
    base: str = ""
    source: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def is_view(self) -> bool:
        """Whether it holds no memory of its own."""
        return self.base != self.name


def make_catalog(nodes: Iterable[fx.Node], prefix: str = "") -> tuple[Captured, ...]:
    """Describe forward nodes, in order; placeholders among them are inputs that have a name.

    Args:
        nodes: of the captured graph.
        prefix: path of the user's model inside what was traced.
    """
    entries = []
    for node in nodes:
        stack = node.meta.get("nn_module_stack")
        base = base_of(node)
        entries.append(
            Captured(
                node.name,
                _operator(node),
                module_path(stack, prefix=prefix),
                block_instance(stack, prefix=prefix),
                names_of(node),
                base.name if base.op == "call_function" else "",
                source_line(node.meta.get("stack_trace")),
                module_calls(stack, prefix=prefix),
                tuple(
                    dict.fromkeys(
                        b.name
                        for b in map(base_of, node.all_input_nodes)
                        if b.op == "call_function"
                    )
                ),
            )
        )
    return tuple(entries)


def _operator(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return batch_norm.NAME if batch_norm.is_part(node) else str(node.target)


def is_view(node: fx.Node) -> bool:
    """Whether it holds no memory of its own, so that it takes the decision of what it reads."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default, enter, leave):
        return True
    return bool(getattr(node.target, "is_view", False))


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory it is in."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def matched(selector: Selector, values: Iterable[Captured]) -> tuple[Captured, ...]:
    """The values that a selector is about, `every` left aside: views only where named themselves."""
    return tuple(
        v for v in values
        if selector.matches(v.op, v.names) and (selector.is_name or not v.is_view)
    )  # fmt: skip


def selected(selector: Selector, values: Iterable[Captured]) -> tuple[Captured, ...]:
    """The values that a selector chooses: of those matched in one block, the first of each `every`."""
    before: Counter[str] = Counter()
    chosen = []
    for value in matched(selector, values):
        if before[value.block] % selector.every == 0:
            chosen.append(value)
        before[value.block] += 1
    return tuple(chosen)


def by_name(catalog: Iterable[Captured]) -> Mapping[str, Captured]:
    """The entries by their node's name."""
    return {value.name: value for value in catalog}
