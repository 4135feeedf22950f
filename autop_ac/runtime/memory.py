"""Measured live bytes on CPU, from the allocation events of torch's profiler.

Weaknesses: the profiler of this process is in use while measuring; on CUDA, ask
``torch.cuda.memory_stats`` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "autop_ac.mark:"


@dataclass
class MeasuredMemory:
    """Live bytes above those at the start, filled when the block ends.

    Attributes:
        peak_bytes: the most bytes alive at once.
        end_bytes: bytes alive at the end.
        marks: bytes alive at each `mark`, by its name.
        live: bytes alive after each allocation or release, in order.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    live: tuple[int, ...] = ()

    def mark(self, name: str) -> None:
        """Remember how many bytes are alive at this point of the block."""
        with record_function(_MARK + name):
            pass


@contextmanager
def measure_memory() -> Iterator[MeasuredMemory]:
    """Measure the CPU bytes that a block allocates and holds::

        with measure_memory() as memory:
            loss = model(x).sum()
            memory.mark("end of forward")
            loss.backward()
        print(memory.peak_bytes, memory.marks["end of forward"])
    """
    measured = MeasuredMemory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield measured
    events = profiler.profiler.kineto_results.experimental_event_tree()
    _fill(measured, events)


def _fill(measured: MeasuredMemory, roots: Any) -> None:
    events: list[tuple[int, int, str]] = []
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if str(event.tag).endswith("Allocation"):
            if event.extra_fields.device == torch.device("cpu"):
                events.append((event.start_time_ns, event.extra_fields.alloc_size, ""))
        elif event.name.startswith(_MARK):
            events.append((event.start_time_ns, 0, event.name.removeprefix(_MARK)))
    alive = 0
    live = []
    for _, size, name in sorted(events, key=lambda e: e[0]):
        alive += size
        live.append(alive)
        if name:
            measured.marks[name] = alive
    measured.peak_bytes = max(live, default=0)
    measured.end_bytes = alive
    measured.live = tuple(live)
