"""Private parts of torch that compiling needs. Seen in torch 2.13.0; no public replacement yet.

Inductor is imported here, and not when it is first needed: its import changes settings of FX, which must
not happen inside a user's `with` block.
"""

from collections.abc import Callable
from typing import Any

from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.subclass_utils import create_subclass_meta
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import get_custom_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _BoxedCodeGen

from ._torch_random import is_seeded, seeds


def inductor_joint_passes(enabled: bool) -> list[Callable[..., Any]]:
    """The user's passes of Inductor over the joint graph, in order."""
    if not enabled:
        return []
    return [
        *get_custom_graph_passes(inductor_config.joint_custom_pre_pass),
        *get_custom_graph_passes(inductor_config.joint_custom_post_pass),
    ]


def is_fake(value: Any) -> bool:
    """Whether a trace is under way and this is one of its tensors."""
    return isinstance(value, FakeTensor)


__all__ = [
    "is_fake",
    "_BoxedCodeGen",
    "is_seeded",
    "seeds",
    "aot_compile_joint_with_descriptors",
    "compile_fx",
    "compile_fx_inner",
    "create_subclass_meta",
    "functorch_config",
    "inductor_config",
    "inductor_joint_passes",
    "select_decomp_table",
]
