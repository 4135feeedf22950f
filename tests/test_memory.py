"""Measured bytes are those of known allocations."""

import pytest
import torch

from autop_ac import measure_memory


def test_peak_marks_and_end_of_known_allocations():
    with measure_memory() as memory:
        first = torch.empty(1000, dtype=torch.float32)
        memory.mark("one")
        second = torch.empty(500, dtype=torch.float32)
        del first
        memory.mark("two")
    assert memory.marks == {"one": 4000, "two": 2000}
    assert memory.peak_bytes == 6000
    assert memory.end_bytes == 2000
    del second


def test_an_exception_leaves_the_profiler_usable():
    with pytest.raises(ZeroDivisionError), measure_memory():
        raise ZeroDivisionError
    with measure_memory() as memory:
        kept = torch.empty(10, dtype=torch.float32)
    assert memory.peak_bytes == kept.numel() * 4
