"""Private parts of torch that cutting a joint graph in two needs; seen in torch 2.13.0.

None has a public replacement yet. Should AOTAutograd accept a saved set from outside, that is where
to move: extraction, replay of random numbers and the pinned settings would all go.
"""

import contextlib
from typing import Any

import torch._functorch.config as functorch_config
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    functionalize_rng_ops,
    min_cut_rematerialization_partition,
)
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule


def fake_mode_of(gm: GraphModule) -> Any:
    """The fake mode that the graph's values belong to; torch looks for the mode that is active."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return contextlib.nullcontext()


__all__ = [
    "OpOverload",
    "_extract_fwd_bwd_modules",
    "fake_mode_of",
    "functionalize_rng_ops",
    "functorch_config",
    "min_cut_rematerialization_partition",
]
