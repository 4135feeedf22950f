"""From wishes about captured nodes to wishes about the local values that compute them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from ..graph.facts import Facts, Value
from .plan import Wish


def root_of(facts: Facts, index: int) -> int:
    """The value whose decision this one takes, following `Value.follows` among forward values."""
    while (up := facts.values[index].follows) is not None and facts.values[up].side == "forward":
        index = up
    return index


def carry(facts: Facts, wishes: Mapping[str, tuple[Wish, ...]]) -> Mapping[int, tuple[Wish, ...]]:
    if not wishes:
        return MappingProxyType({})
    local: dict[str, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    for value in facts.values:
        if value.side == "forward" and value.origin in wishes:
            local[value.origin].append(value.index)
        for i in value.inputs:
            readers[i].append(value.index)
    carried: dict[int, list[Wish]] = defaultdict(list)
    for origin, indices in local.items():
        computed = list(dict.fromkeys(root_of(facts, i) for i in indices))
        kept = _end_of_redistribution(facts, readers, computed[-1])
        moved = [m for i in computed for m in _moves(facts, readers, i)]
        for wish in wishes[origin]:
            for i in (kept,) if wish.action == "save" else dict.fromkeys((*computed, *moved)):
                carried[i].append(wish)
    return MappingProxyType({i: tuple(dict.fromkeys(w)) for i, w in sorted(carried.items())})


def _moves(facts: Facts, readers: Mapping[int, list[int]], start: int) -> list[int]:
    """What inserted redistributions make of a value, step by step, each where it is decided.

    What is moved may be viewed by the user, and moved on from there.
    """
    seen, stack, moves = {start}, [start], dict[int, None]()
    while stack:
        for reader in readers.get(stack.pop(), ()):
            value, root = facts.values[reader], root_of(facts, reader)
            if reader in seen or value.side != "forward":
                continue
            if root == start or root in moves or is_inserted(value):
                seen.add(reader)
                stack.append(reader)
                if root != start:
                    moves[root] = None
    return list(moves)


def is_inserted(value: Value) -> bool:
    """Whether a redistribution made it, on the forward side."""
    return value.side == "forward" and not value.origin and bool(value.serves)


def _end_of_redistribution(facts: Facts, readers: Mapping[int, list[int]], start: int) -> int:
    """Where a saved value lives on this device: itself, or the end of the moves that alone read
    it."""
    seen, stack, moved, ends = {start}, [start], False, set()
    while stack:
        index = stack.pop()
        onward = [facts.values[r] for r in readers.get(index, ())]
        if index != start and is_inserted(facts.values[index]):
            if not any(is_inserted(v) for v in onward):
                ends.add(index)
                continue
            moved = True
            onward = [v for v in onward if is_inserted(v)]
        for value in onward:
            # a view of the value is the value; any other reader needs it as it is
            same = value.side == "forward" and root_of(facts, value.index) == start
            if not is_inserted(value) and not same:
                return start
            moved = moved or is_inserted(value)
            if value.index not in seen:
                seen.add(value.index)
                stack.append(value.index)
    ends = {root_of(facts, i) for i in ends}
    return ends.pop() if moved and len(ends) == 1 else start
