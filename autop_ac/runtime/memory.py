"""Measured live bytes of one device, from the allocation events of torch's profiler.

Every allocation and release that passes torch's allocator of a device is an event with its size and its
time, whoever made it: eager operators, autograd, or kernels made by Inductor. Their running sum is the
number of live bytes above those at the start, exact to the byte. On CUDA the events are those of the
caching allocator: bytes handed to tensors, as ``torch.cuda.memory_allocated`` counts them, not those
that it holds in reserve.

Weaknesses: the profiler of this process is taken while measuring, and one cannot run inside another;
each operator costs some microseconds more. The tree of events is reached through attributes that torch
calls experimental (seen in 2.13.0).
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
        times_s: of each of these, the seconds since the first.
        mark_times_s: seconds of each mark, on the same clock.
        device: whose bytes these are, ``"cpu"`` or ``"cuda:0"``.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    live: tuple[int, ...] = ()
    times_s: tuple[float, ...] = ()
    mark_times_s: dict[str, float] = field(default_factory=dict)
    device: str = "cpu"

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
def measure_memory(device: str | torch.device | None = None) -> Iterator[MeasuredMemory]:
    """Measure the bytes that a block allocates on a device and holds::

        with measure_memory() as memory:
            loss = model(x).sum()
            memory.mark("end of forward")
            loss.backward()
        print(memory.peak_bytes, memory.kept_bytes)
        print(ap.ac_report.beside(memory))          # next to what was predicted

    What was allocated before the block is not counted, nor its release: parameters made before are not in
    the numbers, gradients that backward makes are.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None for this process's GPU where it uses one, else
            the CPU.

    Raises:
        UsageError: another kind of device.
    """
    where = _device(device)
    measured = MeasuredMemory(device=str(where))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield measured
    assert profiler.profiler is not None, "the block has run under the profiler"
    _fill(measured, profiler.profiler.kineto_results.experimental_event_tree(), where)


def _device(given: str | torch.device | None) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(given)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f'measure_memory(device={str(device)!r}): give "cpu" or "cuda", whose allocators report '
            "to torch's profiler"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _fill(measured: MeasuredMemory, roots: Iterable[Any], device: torch.device) -> None:
    events: list[tuple[int, int, int, str]] = []
    stack = list(roots)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if str(event.tag).endswith("Allocation"):
            fields = event.extra_fields
            if fields.device == device:
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size, ""))
        elif event.name.startswith(_MARK):
            events.append((event.start_time_ns, 0, 0, event.name.removeprefix(_MARK)))
    events.sort(key=lambda e: e[0])
    alive = 0
    live = []
    times = []
    own: set[int] = set()  # an earlier block's allocation may be released in this one
    for at, address, size, name in events:
        if size > 0:
            own.add(address)
        elif size < 0 and address not in own:
            continue
        else:
            own.discard(address)
        alive += size
        live.append(alive)
        times.append((at - events[0][0]) / 1e9)
        if name:
            measured.marks[name] = alive
            measured.mark_times_s[name] = times[-1]
    measured.peak_bytes = max(live, default=0)
    measured.end_bytes = alive
    measured.live = tuple(live)
    measured.times_s = tuple(times)
