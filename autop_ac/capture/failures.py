"""What a capture that failed tells: the model's own error, or what Dynamo cannot trace, and where."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import _torch as private
from ..annotate import is_region_object
from .names import source_line

_aten = torch.ops.aten
_OF_ONE_DTYPE = (
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten.convolution.default,
)  # fmt: skip


def own_error(
    entry: torch.nn.Module, tensors: Sequence[torch.Tensor], failed: Exception
) -> Exception | None:
    """What the model itself raises on these inputs, where Dynamo takes that to be so; else None.

    Args:
        entry, tensors: what was traced, over fake tensors: it is run as it is.
        failed: what Dynamo raised.
    """
    if not private.may_be_users(failed):
        return None
    try:
        with torch.no_grad():
            entry(*tensors)
    except private.FAKE_LIMITS:
        return None
    except Exception as error:
        return error
    return None


def mixed_dtypes(graph: torch.fx.Graph) -> str:
    """The first product of tensors of two dtypes, which fails on real tensors alone; else ``""``."""
    for node in graph.nodes:
        values = [n.meta.get("val") for n in node.all_input_nodes]
        dtypes = {v.dtype: None for v in values if isinstance(v, torch.Tensor)}
        if node.target in _OF_ONE_DTYPE and len(dtypes) > 1:
            line = source_line(node.meta.get("stack_trace")) or "an unknown line"
            return f"{line}: {node.target} takes one dtype and gets {' and '.join(map(_short, dtypes))}"
    return ""


def unknown_sizes(graph: torch.fx.Graph) -> str:
    """The first tensor that has another size in each call, such as the steps of a `while_loop`; else ``""``."""
    for node in graph.nodes:
        tensors = [
            v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)
        ]
        found = next((v for v in tensors if not all(type(n) is int for n in v.shape)), None)
        if found is not None:
            line = source_line(node.meta.get("stack_trace")) or "an unknown line"
            return (
                f"{node.target} at {line} gives a tensor of shape {tuple(found.shape)}, whose size depends on "
                "values, and placements are of sizes that are known. Give a loop a number of steps (scan has "
                "one), or move it out of forward"
            )
    return ""


def own_error_text(told: str, inputs: Sequence[tuple[str, Any]]) -> str:
    """Tell of an error that the model raises, and of its inputs by name.

    Args:
        told: the line, a colon, and the error.
        inputs: the names and values of what `input_fn` gives.
    """
    given = ", ".join(_told(name, leaf) for name, leaf in inputs)
    return (
        f"the model raises an error of its own on what input_fn gives, at {told}\n"
        f"input_fn gives: {given}. Give what forward takes, in global shapes; the model raises this "
        "without autop_ac too"
    )


def no_graph_text(failed: Exception) -> str:
    """Tell of what Dynamo cannot trace."""
    line = users_line(failed)
    if is_region_object(str(failed)):
        return (
            f"an ac_region that was made outside of forward is entered at {line}, and Dynamo enters no "
            "object from outside. Call it there: `with self.region():` in place of "
            "`with self.region:`; or make it there, `with ac_region(...):`"
        )
    return (
        f"Dynamo cannot trace the model as one graph, at {line}. Remove what it names from forward, or "
        f"move it out of the model.\n{failed}"
    )


def users_line(error: BaseException) -> str:
    """``"file.py:12"`` of the user's code that an error comes from."""
    stack = getattr(error, "real_stack", None)  # Dynamo's: the code that was traced
    frames = "" if stack is None else "\n".join(stack.format())
    raised = "".join(traceback.format_tb(error.__traceback__))
    places = (source_line(text) for text in (str(error), frames, raised))
    return next(filter(None, places), "an unknown line")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(name: str, leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{name} {_short(leaf.dtype)} {tuple(leaf.shape)}"
    return f"{name} = {leaf!r}"
