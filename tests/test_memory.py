"""Measured bytes are those of known allocations."""

import time
from types import SimpleNamespace

import pytest
import torch

from autop_ac import UsageError, measure_memory
from autop_ac.runtime.memory import MeasuredMemory, _fill


def floats(count):
    return torch.empty(count, dtype=torch.float32)


def test_peak_marks_and_end_of_known_allocations():
    with measure_memory() as memory:
        first = floats(1000)
        memory.mark("one")
        second = floats(500)
        del first
        memory.mark("two")
    assert memory.marks == {"one": 4000, "two": 2000}
    assert memory.peak_bytes == 6000
    assert memory.end_bytes == 2000
    assert memory.live == (4000, 4000, 6000, 2000, 2000)
    assert memory.device == "cpu"
    del second


def test_times_grow_with_the_steps_and_marks_are_on_the_same_clock():
    with measure_memory() as memory:
        kept = [floats(10)]
        memory.mark("middle")
        time.sleep(0.01)
        kept.append(floats(10))
    assert len(memory.times_s) == len(memory.live) == 3
    assert memory.times_s[0] == 0
    assert list(memory.times_s) == sorted(memory.times_s)
    assert memory.mark_times_s == {"middle": memory.times_s[1]}
    assert memory.times_s[2] - memory.times_s[1] >= 0.01


def allocation(at, address, size, device):
    fields = SimpleNamespace(ptr=address, alloc_size=size, device=torch.device(device))
    return SimpleNamespace(
        tag="_EventType.Allocation", extra_fields=fields, start_time_ns=at, children=[], name=""
    )


def test_events_of_other_devices_do_not_count():
    """The events of a GPU, made by hand: there is none here."""
    events = [
        allocation(1, 7, 100, "cuda:0"),
        allocation(2, 8, 1000, "cpu"),
        allocation(3, 9, 50, "cuda:0"),
        allocation(4, 7, 10_000, "cuda:1"),
        allocation(5, 7, -100, "cuda:0"),
    ]
    memory = MeasuredMemory()
    _fill(memory, reversed(events), torch.device("cuda", 0))
    assert memory.live == (100, 150, 50)
    assert (memory.peak_bytes, memory.end_bytes) == (150, 50)


def test_a_device_without_such_events_is_refused():
    with pytest.raises(UsageError, match="measure_memory.device='meta'"), measure_memory("meta"):
        pass


def test_what_was_allocated_before_the_block_is_not_counted():
    before = floats(1000)
    with measure_memory() as memory:
        assert before.numel() == 1000
        del before
        short = floats(10)
        del short
    assert memory.peak_bytes == 40
    assert memory.end_bytes == 0


def test_kept_bytes_are_what_backward_reads():
    weight = torch.randn(64, 64, requires_grad=True)
    with measure_memory() as memory:
        x = torch.ones(32, 64)
        y = torch.relu(x @ weight)  # relu keeps its result, the product its input
        loss = y.sum()
        memory.mark("end of forward")
        loss.backward()
    held = 2 * 32 * 64 * 4 + 4  # x, y and the loss
    assert memory.kept_bytes == held
    assert memory.peak_bytes >= held + weight.grad.nbytes


def test_views_hold_nothing_and_a_block_may_be_empty():
    base = floats(100)
    with measure_memory() as memory:
        view = base.view(10, 10).t()
    assert (memory.peak_bytes, memory.end_bytes) == (0, 0)
    assert view.shape == (10, 10)
    with measure_memory() as memory:
        pass
    assert (memory.peak_bytes, memory.live) == (0, ())


def test_kept_bytes_without_the_mark_say_what_to_do():
    with measure_memory() as memory:
        memory.mark("elsewhere")
        with pytest.raises(UsageError, match="after the block has ended"):
            _ = memory.kept_bytes
    with pytest.raises(UsageError, match=r"\.mark\(\"end of forward\"\).*\['elsewhere'\]"):
        _ = memory.kept_bytes


def test_an_exception_leaves_the_profiler_usable():
    with pytest.raises(ZeroDivisionError), measure_memory():
        raise ZeroDivisionError
    with measure_memory() as memory:
        kept = floats(10)
    assert memory.peak_bytes == kept.nbytes


def test_what_an_earlier_block_allocated_does_not_count_when_it_is_released_in_a_later_one():
    with measure_memory():
        held = torch.zeros(1 << 20)
    with measure_memory() as memory:
        del held
        kept = torch.zeros(1 << 10)
    assert memory.end_bytes == kept.nbytes
    assert min(memory.live) >= 0
