"""Private parts of torch that compiling needs. Seen in torch 2.13.0; no public replacement yet.

Inductor is imported here, and not when it is first needed: its import changes settings of FX, which must
not happen inside a user's `with` block.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.subclass_utils import create_subclass_meta
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    boxed_nop_preserve_node_meta,
)
from torch._inductor import config as inductor_config
from torch._inductor import decomposition, inductor_prims
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import get_custom_graph_passes


def inductor_joint_passes(enabled: bool) -> list[Callable[..., Any]]:
    """The user's passes of Inductor over the joint graph, in order."""
    if not enabled:
        return []
    return [
        *get_custom_graph_passes(inductor_config.joint_custom_pre_pass),
        *get_custom_graph_passes(inductor_config.joint_custom_post_pass),
    ]


def select_decomp_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor wants to see done, random numbers by seed among them.

    Inductor lowers no ``aten.rand``: its own pass in front of the partitioner puts its primitives in
    their place. That pass comes too late for a plan that is made on the graph.
    """
    table = dict(decomposition.select_decomp_table())
    if inductor_config.fallback_random:
        return table

    def seed(device: Any) -> Any:
        device = torch.empty([]).device if device is None else device
        return inductor_prims.lookup_seed(inductor_prims.seeds(1, device), 0)

    def drawn(mode: str) -> Callable[..., Any]:
        def draw(
            size: Any, *, dtype: Any = None, device: Any = None, layout: Any = None,
            pin_memory: Any = None,
        ) -> Any:  # fmt: skip
            drawn = inductor_prims.random(size, seed(device), mode)
            return drawn.to(torch.get_default_dtype() if dtype is None else dtype)

        return draw

    def integers(
        low: int, high: int, size: Any, *, dtype: Any = torch.int64, device: Any = None,
        layout: Any = None, pin_memory: Any = None,
    ) -> Any:  # fmt: skip
        return inductor_prims.randint(low, high, size, seed(device)).to(dtype)

    aten = torch.ops.aten
    table[aten.rand.default] = drawn("rand")
    table[aten.randn.default] = drawn("randn")
    table[aten.randint.low] = integers
    table[aten.randint.default] = functools.partial(integers, 0)
    return table


__all__ = [
    "aot_compile_joint_with_descriptors",
    "boxed_nop_preserve_node_meta",
    "compile_fx_inner",
    "create_subclass_meta",
    "functorch_config",
    "inductor_joint_passes",
    "select_decomp_table",
]
