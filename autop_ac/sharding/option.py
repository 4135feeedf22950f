"""One way to place a node, and how a node's arguments and results are counted."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils import _pytree as pytree

from .plan import Placements


@dataclass(frozen=True, slots=True)
class Option:
    """One way to place a node; `inputs` and `outputs` as in `Choice`.

    Attributes:
        compute_s: seconds of the local computation.
        output_bytes: bytes of the local outputs, for breaking ties.
    """

    inputs: tuple[Placements | None, ...]
    outputs: tuple[Placements | None, ...]
    compute_s: float = 0.0
    output_bytes: int = 0


def leaves_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The FX-node arguments in the order that `Choice.inputs` uses."""
    leaves = pytree.arg_tree_leaves(*node.args, **node.kwargs)
    return [a for a in leaves if isinstance(a, torch.fx.Node)]


def outputs_of(node: torch.fx.Node) -> tuple[torch.Tensor | None, ...]:
    """What the operator gives: one value for a tensor, one per entry for a tuple or list, nested ones too."""
    values = entries(node.meta.get("val"))
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


def entries(value: Any) -> list[Any]:
    """A result in the order of `Choice.outputs`: itself, or what a tuple or list holds, nested ones too."""
    return pytree.tree_leaves(value) if isinstance(value, (tuple, list)) else [value]


def producer_of(node: torch.fx.Node) -> tuple[torch.fx.Node, int]:
    """The operator that gives a node's value and the number of it there, getitem looked through."""
    path: list[int] = []
    while node.op == "call_function" and node.target is operator.getitem:
        path.insert(0, node.args[1])
        node = node.args[0]
    index, value = 0, node.meta.get("val")
    for i in path:
        index += sum(len(entries(v)) for v in value[:i])
        value = value[i]
    return node, index


def given(option: Option, output: int) -> Placements:
    """What the option gives as its output of that number."""
    placements = option.outputs[output]
    assert placements is not None
    return placements


def wanted(option: Option, slot: int) -> Placements:
    """What the option wants in that slot (-1: its own first output)."""
    placements = option.outputs[0] if slot < 0 else option.inputs[slot]
    assert placements is not None
    return placements


def whole(placements: Placements) -> Placements:
    """The placements with Partial replaced by Replicate."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
