"""The all-gather contract: which values are a gathered parameter, on their way to where it is used.

A chain starts at a parameter and goes on through every forward operation whose only tensor input is on
the chain (casts, views, pads, slices, gathers and their waits); ``cat`` and ``stack`` go on where all
their inputs come from the same parameter, which is how a gather along a tensor dim other than 0 ends.
An operation that meets a second tensor ends it. Of a chain, those values belong to the contract that
lie before or after a gather: a parameter that is never gathered has none. One function answers, for
finding and for tagging. Linear in nodes and edges.
"""

from __future__ import annotations

from ..graph.facts import Facts, Value

_JOINS = ("aten.cat.", "aten.stack.")


def is_parameter_gather(value: Value) -> bool:
    """A gather, or any other redistribution that the shard pass stamped with a parameter's name."""
    return value.collective.startswith("all_gather") or bool(value.collective and value.parameter)


def parameter_chains(facts: Facts) -> frozenset[int]:
    """Indices of the forward values that the contract recomputes (or saves, without resharding)."""
    root: dict[int, int] = {}  # value on a chain -> index of the parameter
    gathered: set[int] = set()
    for value in facts.values:
        if value.role == "parameter":
            root[value.index] = value.index
        elif value.side == "forward":
            start = _continues(facts, value, root)
            if start is None:
                continue
            # of several gathered in one collective, each part goes on as a parameter of its own
            of_several = value.op == "getitem" and "coalesced" in facts.values[value.inputs[0]].op
            root[value.index] = value.index if of_several else start
            if is_parameter_gather(value) or not gathered.isdisjoint(value.inputs):
                gathered.add(value.index)
    on_the_way = {i for i in gathered if is_parameter_gather(facts.values[i])}
    for value in reversed(facts.values):
        if value.index in on_the_way:
            on_the_way.update(i for i in value.inputs if i in root)
    return frozenset(i for i in gathered | on_the_way if facts.values[i].side == "forward")


def _continues(facts: Facts, value: Value, root: dict[int, int]) -> int | None:
    """The parameter whose chain goes on through `value`, None where none does."""
    if value.random or value.effectful or not value.is_tensor:
        return None
    sources = [i for i in value.inputs if facts.values[i].is_tensor]
    if not sources or any(i not in root for i in sources):
        return None
    starts = {root[i] for i in sources}
    coalesced = "coalesced" in value.collective
    joins = value.op.startswith(_JOINS) and len(starts) == 1
    return min(starts) if len(sources) == 1 or joins or coalesced else None
