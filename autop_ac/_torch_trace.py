"""PyTorch's structured trace, which ``TORCH_TRACE`` writes and tlparse reads; seen in torch 2.13.0.

There is no public way to add an artifact to it yet.
"""

from collections.abc import Callable

from torch._logging._internal import trace_structured


def artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Add a text to the trace; `text` is called only where a trace is written.

    Args:
        encoding: "string", or "json".
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"autop_ac_{name}", "encoding": encoding},
        payload_fn=text,
        expect_trace_id=False,
    )


__all__ = ["artifact"]
