"""Private parts of torch that flex attention needs; seen in torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

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


__all__ = ["flex_attention", "flex_attention_backward", "traced_with_gradients"]
