"""Private parts of torch that cutting a joint graph in two needs; seen in torch 2.13.0.

None has a public replacement yet. Should AOTAutograd accept a saved set from outside, that is where
to move: extraction, replay of random numbers and the pinned settings would all go.
"""

import torch._functorch.config as functorch_config
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    functionalize_rng_ops,
    min_cut_rematerialization_partition,
    must_recompute,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import is_symbol_binding_fx_node

__all__ = [
    "FakeTensor",
    "_extract_fwd_bwd_modules",
    "functionalize_rng_ops",
    "functorch_config",
    "is_symbol_binding_fx_node",
    "min_cut_rematerialization_partition",
    "must_recompute",
]
