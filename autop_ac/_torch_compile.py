"""Private parts of torch that compiling needs. Seen in torch 2.13.0; no public replacement yet."""

from torch._functorch._aot_autograd.subclass_utils import create_subclass_meta
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    boxed_nop_preserve_node_meta,
)
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table

__all__ = [
    "aot_compile_joint_with_descriptors",
    "boxed_nop_preserve_node_meta",
    "compile_fx_inner",
    "create_subclass_meta",
    "select_decomp_table",
]
