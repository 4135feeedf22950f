"""The user's own passes over the joint graph, run in front of our plan instead of behind it.

PyTorch and Inductor run these between tracing and partitioning. A plan must speak of the graph that is
partitioned, so they run here, once, on the local graph, and PyTorch's own call is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _torch_compile as private
from ..capture.joint import JointGraph
from ..sharding.apply import LocalGraph
from .compile import Backend


def run_user_passes(local: LocalGraph, joint: JointGraph, backend: Backend) -> LocalGraph:
    """The local graph after ``joint_custom_pass`` of functorch and, for Inductor, its joint passes."""
    module, graph_passes = local.module, private.inductor_joint_passes(backend == "inductor")
    user_pass = private.functorch_config.joint_custom_pass
    if user_pass is None and not graph_passes:
        return local
    if user_pass is not None:
        values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        kinds = [p.kind for p in local.placeholders.values()]
        primals = [v for v, kind in zip(values, kinds, strict=True) if kind != "tangent"]
        tangents = [v for v, kind in zip(values, kinds, strict=True) if kind == "tangent"]
        module = user_pass(module, (primals, tangents))
    for graph_pass in graph_passes:
        graph_pass(module.graph)
    module.graph.lint()
    module.recompile()
    with joint.fake_mode:
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = _value(node)
    return replace(local, module=module)


def _value(node: torch.fx.Node) -> Any:
    def known(arg: Any) -> Any:
        return arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg

    args, kwargs = pytree.tree_map(known, (tuple(node.args), dict(node.kwargs)))
    return node.target(*args, **kwargs)


@contextmanager
def user_passes_done() -> Iterator[None]:
    """While open, PyTorch does not run the user's pass again."""
    with private.functorch_config.patch(joint_custom_pass=None):
        yield
