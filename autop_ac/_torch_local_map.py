"""Private parts of torch that `local_map` in a model needs; seen in torch 2.13.0.

Dynamo keeps a call of `local_map` as an operator with a graph inside, traced on the shapes of one
device, where it is told to. There is no public switch yet. Its own checks are assertions, so that what
they are about is looked at here first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable
from torch._guards import TracingContext
from torch._higher_order_ops.local_map import local_map_hop

_NAMES = (
    "out_placements", "in_placements", "in_grad_placements", "device_mesh", "redistribute_inputs",
)  # fmt: skip


@contextlib.contextmanager
def keeping_local_maps(
    check: Callable[[dict[str, Any], list[Any], str, int], None],
) -> Iterator[None]:
    """While open, Dynamo keeps `local_map` as an operator.

    Args:
        check: called before the body is traced, with the settings of `local_map`, the inputs (shapes,
            None for what is no tensor), the user's stack, and how many calls it is inside of.
    """
    traced = LocalMapWrappedHigherOrderVariable._call_function
    depth = 0

    def checked(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        settings = {name: _real(arg) for name, arg in zip(_NAMES, args[1:6], strict=True)}
        given = [arg.realize() for arg in args[6:]]
        for arg in given:
            if (
                arg.is_tensor()
            ):  # what a checkpoint around the call reads is lifted with its whole shape
                tx.output.current_tracer.maybe_lift_tracked_freevar_to_input(arg.as_proxy())
        shapes = [
            arg.as_proxy().node.meta["example_value"].shape if arg.is_tensor() else None
            for arg in given
        ]
        stack = "".join(TracingContext.extract_stack().format())
        check(settings, shapes, stack, depth)
        depth += 1
        try:
            return traced(self, tx, args, kwargs)
        finally:
            depth -= 1

    with (
        LocalMapWrappedHigherOrderVariable.enable(),
        mock.patch.object(LocalMapWrappedHigherOrderVariable, "_call_function", checked),
    ):
        yield


def _real(variable: Any) -> Any:
    """What Dynamo's variable stands for."""
    value = (
        variable.realize().as_python_constant()
        if not hasattr(variable, "value")
        else variable.value
    )
    return getattr(value, "real_obj", value)


def settings_of(body: torch.fx.GraphModule) -> dict[str, Any]:
    """The settings of `local_map` that a body was traced with."""
    kept = body.meta["local_map_kwargs"]
    return {name: getattr(value, "real_obj", value) for name, value in kept.items()}


__all__ = ["keeping_local_maps", "local_map_hop", "settings_of"]
