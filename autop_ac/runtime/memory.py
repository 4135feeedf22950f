"""Measured live bytes on CPU, from the allocation events of torch's profiler.

Every allocation and release that passes torch's CPU allocator is an event with its size, whoever made
it: eager operators, autograd, or kernels made by Inductor. Their running sum is the number of live bytes
above those at the start, exact to the byte.

Weaknesses: the profiler of this process is taken while measuring, and one cannot run inside another;
each operator costs some microseconds more. On CUDA ask `torch.cuda.memory_stats` instead. The tree of
events is reached through attributes that torch calls experimental (seen in 2.13.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..errors import UsageError

END_OF_FORWARD = "end of forward"
"""The mark that `MeasuredMemory.kept_bytes` reads."""

_MARK = "autop_ac.mark:"


@dataclass
class MeasuredMemory:
    """Live bytes of what a `measure_memory` block allocates, filled when it ends.

    Attributes:
        peak_bytes: the most bytes alive at once.
        end_bytes: bytes alive at the end.
        marks: bytes alive at each `mark`, by its name; of a name used twice, at the last.
        live: bytes alive after each allocation, release and mark, in order.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    live: tuple[int, ...] = ()

    def mark(self, name: str) -> None:
        """Remember how many bytes are alive at this point of the block."""
        with record_function(_MARK + name):
            pass

    @property
    def kept_bytes(self) -> int:
        """Bytes alive at ``mark("end of forward")``: what forward keeps for backward, and its result.

        Raises:
            UsageError: the block has no such mark, or has not ended.
        """
        if END_OF_FORWARD not in self.marks:
            raise UsageError(
                f'kept_bytes needs a mark: call .mark("{END_OF_FORWARD}") in the block, and read it '
                f"after the block has ended; marks are {sorted(self.marks)}"
            )
        return self.marks[END_OF_FORWARD]


@contextmanager
def measure_memory() -> Iterator[MeasuredMemory]:
    """Measure the CPU bytes that a block allocates and holds::

        with measure_memory() as memory:
            loss = model(x).sum()
            memory.mark("end of forward")
            loss.backward()
        print(memory.peak_bytes, memory.kept_bytes)

    What was allocated before the block is not counted, nor its release: parameters made before are not in
    the numbers, gradients that backward makes are.
    """
    measured = MeasuredMemory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield measured
    assert profiler.profiler is not None, "the block has run under the profiler"
    _fill(measured, profiler.profiler.kineto_results.experimental_event_tree())


def _fill(measured: MeasuredMemory, roots: Iterable[Any]) -> None:
    events: list[tuple[int, int, int, str]] = []
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if str(event.tag).endswith("Allocation"):
            fields = event.extra_fields
            if fields.device == torch.device("cpu"):
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size, ""))
        elif event.name.startswith(_MARK):
            events.append((event.start_time_ns, 0, 0, event.name.removeprefix(_MARK)))
    alive = 0
    live = []
    own: set[int] = set()  # an earlier block's allocation may be released in this one
    for _, address, size, name in sorted(events, key=lambda e: e[0]):
        if size > 0:
            own.add(address)
        elif size < 0 and address not in own:
            continue
        else:
            own.discard(address)
        alive += size
        live.append(alive)
        if name:
            measured.marks[name] = alive
    measured.peak_bytes = max(live, default=0)
    measured.end_bytes = alive
    measured.live = tuple(live)
