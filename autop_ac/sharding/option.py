"""One way to place a node, and how a node's arguments and results are counted."""

from __future__ import annotations

from dataclasses import dataclass

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
    """What the operator gives: one value for a tensor, one per entry for a tuple or list."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


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
