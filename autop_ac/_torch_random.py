"""Private parts of torch that drawing random numbers from seeds needs; seen in torch 2.13.0.

Inductor's primitives have no public replacement yet.
"""

from typing import Any

import torch
from torch._inductor.inductor_prims import lookup_seed, randint, random, seeds


def is_seeded(op: Any) -> bool:
    """Whether an operator draws from the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


__all__ = ["is_seeded", "lookup_seed", "randint", "random", "seeds"]
