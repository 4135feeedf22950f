"""Private parts of torch that hints and selectors need, imported here and nowhere else.

Each name was seen in torch 2.13.0. `annotate` writes what ends in ``node.meta["custom"]``; there is
no public replacement yet. The list of operator names has none either.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _higher_order_ops
from torch.fx.traceback import annotate

F = TypeVar("F", bound=Callable[..., Any])


@torch.library.custom_op("autop_ac::mark", mutates_args=())
def _mark(x: torch.Tensor, name: str) -> None:
    """Reads a value and gives nothing: all that it does is to stand in the graph."""


@_mark.register_fake
def _(x: torch.Tensor, name: str) -> None:
    return None


mark = torch.ops.autop_ac.mark.default
# else what has no result is dropped as dead
torch.fx.has_side_effect(mark)


@torch.library.custom_op("autop_ac::placed", mutates_args=())
def _placed(x: torch.Tensor, placements: str, source: str) -> torch.Tensor:
    """Gives a value back; stands where its placement is fixed, and its gradient's."""
    return x.clone()


@_placed.register_fake
def _(x: torch.Tensor, placements: str, source: str) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_placements(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.placements, ctx.source = inputs


def _gradient_placed(ctx: Any, gradient: torch.Tensor) -> Any:
    return _placed(gradient, ctx.placements, ctx.source), None, None


_placed.register_autograd(_gradient_placed, setup_context=_keep_placements)
placed = torch.ops.autop_ac.placed.default


def operator_names() -> list[str]:
    """Every registered operator, as ``"aten.mm.default"``."""
    names = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        names.append(f"{namespace}.{name}.{overload or 'default'}")
    return names


def operator_count() -> int:
    """How many operators are registered now; grows as libraries are imported."""
    return len(torch._C._dispatch_get_all_op_names()) + len(_higher_order_ops)


def higher_order_names() -> list[str]:
    """Every higher-order operator that is registered, as ``"flex_attention"``."""
    return list(_higher_order_ops)


def is_higher_order(name: str) -> bool:
    """Whether a higher-order operator of this name is registered."""
    return name in _higher_order_ops


def traced_line() -> tuple[str, int] | None:
    """File and line of the user's code that Dynamo traces now, innermost frame first asked."""
    if TracingContext.try_get() is None:
        return None
    for frame in reversed(TracingContext.extract_stack()):
        if not frame.filename.endswith(("autop_ac/annotate.py", "/contextlib.py")):
            return frame.filename, frame.lineno or 0
    return None


def compiling_backend() -> Any:
    """The backend that `torch.compile` traces for now, without PyTorch's wrappers; None outside."""
    tracer = _tracer()
    found = None if tracer is None else tracer.output.compiler_fn
    while found is not None:
        inner = getattr(found, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(found, "compiler_fn", None)
        if inner is None or inner is found:
            return found
        found = inner
    return None


def root_function() -> str:
    """Name of the function whose frame Dynamo traces now."""
    tracer = _tracer()
    return "" if tracer is None else tracer.output.root_tx.f_code.co_name


_OTHERS = tuple(
    os.path.dirname(m) + os.sep for m in (torch.__file__, __file__, contextlib.__file__)
)


def is_users_file(name: str) -> bool:
    """Whether a source file is the user's: not torch's, not of this package, not of Python itself.

    By where these are installed: a user's own folder may be called as they are.
    """
    if name.startswith(("<ipython-input", "<stdin>")):
        return True
    if not os.path.isabs(name) or name.startswith(_OTHERS[:2]):
        return False
    return not name.startswith(_OTHERS[2]) or "site-packages" in name


def running_line() -> str:
    """``"file.py:12"`` of the user's code that Python runs now, outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def _tracer() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no trace has run in this thread
        return None


def constant_while_tracing(fn: F) -> F:
    """Mark `fn` to run at trace time, its result taken as a constant."""
    return cast(F, torch._dynamo.assume_constant_result(fn))


__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "annotate",
    "compiling_backend",
    "constant_while_tracing",
    "root_function",
    "running_line",
    "higher_order_names",
    "is_users_file",
    "is_higher_order",
    "mark",
    "operator_count",
    "operator_names",
    "placed",
    "traced_line",
]
