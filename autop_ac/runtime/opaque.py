"""A parallel module inside `torch.compile`: what runs there is what runs without it.

Its graphs are planned, partitioned and compiled already. Traced once more, they would be partitioned by
another's rules, and gathered weights be kept. Under a backend of ours the whole call is one node of
Dynamo's graph, which is run as it is; under any other, the call is left to eager, and refused by Dynamo
where the user asks for a graph without breaks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._torch_compile import is_fake
from ..errors import UsageError

MARK = "autop_ac_compiled"
"""Attribute of a function in Dynamo's graph that is compiled already."""

REASON = (
    "a parallel module of autop_ac is compiled already, by configure_compile: call it as it is, or use "
    "torch.compile(module, backend=autop_ac.backend()) to have it in one graph with other code"
)

Call = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Fakes = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], list[torch.Tensor]]


def as_one_node(module: torch.nn.Module, call: Call, fakes: Fakes) -> Callable[..., Any]:
    """A function of a call's arguments that Dynamo takes for an operator; it gives flat tensors.

    Args:
        call: the forward of `module`.
        fakes: what `call` gives, as empty tensors of the same shapes, for the trace.
    """
    held = weakref.ref(module)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        here = held()
        if here is None:
            raise UsageError("the parallel module was deleted, and its compiled form is called")
        if any(is_fake(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return tuple(fakes(here, args, kwargs))
        return tuple(t for t in pytree.tree_leaves(call(here, args, kwargs)))

    setattr(run, MARK, True)
    made: Callable[..., Any] = torch.compiler.allow_in_graph(run)
    return made


def is_compiled_already(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's calls a parallel module, itself or in an inner graph (a checkpoint)."""
    graphs = [g.graph for g in graph.modules() if isinstance(g, torch.fx.GraphModule)]
    return any(getattr(node.target, MARK, False) for g in graphs for node in g.nodes)
