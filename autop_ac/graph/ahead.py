"""Gathers of parameters issued ahead of the computation that waits for them.

A gather takes time that its own device need not spend: it is started, and waited for where its first
reader stands. In graph order both stand side by side, and nothing is gained. Here a gather is started as
soon as the one before it has been waited for, or earlier, while the bytes in flight (started and not
waited for yet) stay within a bound. One that is larger than the bound goes alone. So at most the bound,
or the largest gather, is alive that was not before, and what it was gathered from (`bytes_ahead`). A
gather of a gather (two mesh axes) is not moved: its start would wait for the first. Likewise
reduce-scatters and all-reduces of gradients are waited for one later.

Linear in values and edges, but for chains in front of a gather, which are walked once for each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from .facts import Facts, Value


def issue_ahead(facts: Facts, order: Sequence[int], limit_bytes: int) -> tuple[int, ...]:
    """`order` with the starts of parameter gathers, and what leads to them, moved to the front.

    Args:
        order: values of one graph, in an order that computes inputs first.
        limit_bytes: of what is gathered ahead, unless it is one gather alone.
    """
    values = facts.values
    there = set(order)
    waiting: deque[tuple[int, tuple[int, ...], int]] = deque()
    taken: set[int] = set()
    for i in order:
        if not (values[i].collective.startswith("all_gather") and values[i].parameter):
            continue
        chain = _chain(facts, i, there)
        if chain is not None and taken.isdisjoint(chain):
            waiting.append((i, chain, _gathered_bytes(facts, i)))
            taken.update(chain)
    if not waiting:
        return tuple(order)
    start_of = {c: gather for gather, chain, _ in waiting for c in chain}
    sizes = {gather: size for gather, _, size in waiting}
    made: list[int] = []
    done: set[int] = set()
    in_flight: dict[int, int] = {}

    def issue(room: int) -> None:
        while waiting:
            gather, chain, size = waiting[0]
            if gather in done:
                waiting.popleft()
                continue
            if in_flight and sum(in_flight.values()) + size > room:
                return
            waiting.popleft()
            made.extend(chain)
            done.update(chain)
            in_flight[gather] = size

    issue(limit_bytes)
    for i in order:
        if i in done:
            continue
        if i in start_of:  # there was no room to issue it before
            gather = start_of[i]
            chain = next(c for g, c, _ in waiting if g == gather)
            made.extend(chain)
            done.update(chain)
            in_flight[gather] = sizes[gather]
            continue
        if _is_wait(facts, i):
            for gather in _waited(facts, i):
                if in_flight.pop(gather, None) is not None:
                    issue(limit_bytes)
        made.append(i)
        done.add(i)
    return tuple(made)


def wait_late(facts: Facts, order: Sequence[int]) -> tuple[int, ...]:
    """`order` with the waits for sums of gradients, and what follows them, one such sum later."""
    values = facts.values
    made: list[int] = []
    late: list[int] = []
    behind: set[int] = set()  # what is computed from a sum that is not waited for
    for i in order:
        value = values[i]
        scatter = _sums_gradient(value)
        if behind.isdisjoint(value.inputs):
            if scatter:
                made.append(i)
                made.extend(late)
                late, behind = [], {i}
                continue
            made.append(i)
        elif scatter:  # of another sum: what it reads must come first
            made.extend(late)
            made.append(i)
            late, behind = [], {i}
        elif value.op == "getitem" and values[value.inputs[0]].collective:  # of several at once
            made.append(i)
            behind.add(i)
        elif len(value.inputs) == 1:
            late.append(i)
            behind.add(i)
        else:
            made.extend(late)
            made.append(i)
            late, behind = [], set()
    return (*made, *late)


def _sums_gradient(value: Value) -> bool:
    return value.collective.startswith(("reduce_scatter", "all_reduce")) and bool(value.parameter)


def _is_wait(facts: Facts, index: int) -> bool:
    return facts.values[index].op.endswith("wait_tensor.default")


def _waited(facts: Facts, wait: int) -> tuple[int, ...]:
    (source, *_) = facts.values[wait].inputs
    if facts.values[source].op == "getitem":
        (source, *_) = facts.values[source].inputs
    return (source,)


def _gathered_bytes(facts: Facts, gather: int) -> int:
    """Bytes that a gather gives: the same on every rank, also where parts are uneven.

    Were what leads to it counted, ranks would issue gathers in different orders, and wait for each other.
    """
    return sum(facts.storage_bytes[s] for s in facts.values[gather].storages)


def bytes_ahead(facts: Facts) -> int:
    """The most bytes that gathers issued ahead may hold at once, with what they are gathered from."""
    if facts.prefetch_bytes is None:
        return 0
    there = {v.index for v in facts.forward}
    largest, total, share = 0, 0, 1.0
    for value in facts.forward:
        if value.collective.startswith("all_gather") and value.parameter:
            gathered = _gathered_bytes(facts, value.index)
            chain = _chain(facts, value.index, there)
            if chain is not None and gathered:
                held = {s for i in chain for s in facts.values[i].storages if facts.values[i].bytes}
                share = max(share, sum(facts.storage_bytes[s] for s in held) / gathered)
                largest, total = max(largest, gathered), total + gathered
    return math.ceil(share * min(total, max(largest, facts.prefetch_bytes)))


def bytes_late(facts: Facts) -> int:
    """The most bytes that a sum of gradients which is waited for later may hold meanwhile."""
    if facts.prefetch_bytes is None:
        return 0
    values, size = facts.values, facts.storage_bytes
    held = [
        {s for i in (v.index, *v.inputs) for s in values[i].storages}
        for v in values
        if _sums_gradient(v)
    ]
    return max((sum(size[s] for s in storages) for storages in held), default=0)


def _chain(facts: Facts, gather: int, there: set[int]) -> tuple[int, ...] | None:
    """What leads to a gather in this graph, and it; None if a wait, or what must not move, is there."""
    found = {gather}
    work = list(facts.values[gather].inputs)
    while work:
        i = work.pop()
        if i in found or i not in there:
            continue
        value = facts.values[i]
        if value.random or value.effectful or value.side != "forward" or _is_wait(facts, i):
            return None
        found.add(i)
        work.extend(value.inputs)
    return tuple(sorted(found))
