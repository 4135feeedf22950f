"""Private parts of torch that flex attention needs; seen in torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as module
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward


@contextlib.contextmanager
def traced_with_gradients() -> Iterator[None]:
    """While open, flex attention on the CPU may be traced with its backward.

    What torch refuses there is its compiled kernel, which has none; graphs of the CPU stand for those of
    described devices too, and run node by node there is a backward.
    """
    with mock.patch.object(module, "_validate_device", lambda query, key, value: None):
        yield


def backward_with_gradients(*args: Any) -> Any:
    """The backward run node by node, with the gradients of all that `score_mod` looks things up in.

    Torch's own leaves out those of what requires none, and in a backward that runs nothing does.
    """
    place = len(args) - 2
    looked_up = tuple(
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in args[place]
    )
    operator: Any = flex_attention_backward
    with torch.no_grad():
        return operator(*args[:place], looked_up, *args[place + 1 :])


__all__ = [
    "backward_with_gradients",
    "flex_attention",
    "flex_attention_backward",
    "traced_with_gradients",
]
