"""The saved set that follows from decisions, and the check that it is the one realised.

A decision says "save" or "recompute" of a value that backward needs; which tensors then cross from
forward to backward follows by walking back from what backward reads:

- a value to be recomputed needs its inputs, down to saved values and graph inputs;
- a view is recomputed, for nothing, from the tensor that owns its storage, and that tensor stands for
  all its views: nothing is kept twice. A view of a graph input costs nothing either;
- of an operator with several results those that are needed are kept (the tuple itself cannot be);
- of a collective the waited result is kept;
- a constant of the graph is at hand in both graphs; a symbolic size is kept.

What must not be recomputed is kept whatever the decision says: results of effectful operators, and
values computed from an input that forward changes. Iterative, linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import PartitionError
from ..graph.facts import Facts
from ..graph.liveness import live_backward
from .plan import Action


def must_be_saved(facts: Facts, index: int) -> bool:
    """Recomputing this value would repeat an effect or read an input that forward has changed."""
    value = facts.values[index]
    return value.side == "forward" and (
        value.effectful or (value.reads_mutated and value.follows is None)
    )


def effective_action(facts: Facts, actions: Mapping[int, Action], index: int) -> Action:
    """The action that holds for `index`: that of its root, unless it must be saved.

    A forward value without an action is saved, as an untagged one is by PyTorch's own partitioner.
    """
    value = facts.values[index]
    while not must_be_saved(facts, value.index):
        if value.op == "get_attr" or value.side == "input":
            return "recompute"  # at hand in both graphs
        if value.follows is None:
            return actions.get(value.index, "save")
        value = facts.values[value.follows]
    return "save"


def closure(facts: Facts, actions: Mapping[int, Action]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What backward is given when `actions` hold.

    Args:
        actions: by index of forward value; views and getitem take that of what they follow.

    Returns:
        Indices, ascending, of the forward values to keep, and of the graph inputs (tangents not
        counted) that backward reads.
    """
    values = facts.values
    producers = {v.follows for v in values if v.op == "getitem"}  # these give tuples
    saved: set[int] = set()
    saved_inputs: set[int] = set()
    seen: set[int] = set()
    work = list(facts.backward_outputs)
    for i in live_backward(facts):
        work.extend(values[i].inputs)
    while work:
        i = work.pop()
        if i in seen:
            continue
        seen.add(i)
        value = values[i]
        if value.side == "input":
            if value.role != "tangent":
                saved_inputs.add(i)
        elif value.side == "forward":
            if not value.is_tensor and value.op != "get_attr":
                saved.add(i)
            elif effective_action(facts, actions, i) == "save" and keepable(facts, i, producers):
                saved.add(i)
            else:
                work.extend(value.inputs)
    return tuple(sorted(saved)), tuple(sorted(saved_inputs))


def keepable(facts: Facts, index: int, producers: set[int | None]) -> bool:
    """Whether this value stands for its storage: a tensor that is a view of no keepable one."""
    value = facts.values[index]
    if index in producers:
        return False
    if value.follows is None or value.effectful or "wait_tensor" in value.op:
        return True
    source = facts.values[value.follows]
    if value.op == "getitem":  # of new results; of a split it is one more view
        return source.effectful or (source.follows is None and not source.collective)
    return False


def check_saved(expected_names: Iterable[str], realised_names: Iterable[str]) -> None:
    """Hold what the partition keeps against what was planned.

    Raises:
        PartitionError: they differ; the message lists the differences both ways.
    """
    expected, realised = set(expected_names), set(realised_names)
    if expected == realised:
        return
    parts = []
    if missing := sorted(expected - realised):
        parts.append(f"planned but not kept: {_listed(missing)}")
    if extra := sorted(realised - expected):
        parts.append(f"kept but not planned: {_listed(extra)}")
    raise PartitionError(
        "the values kept from forward to backward are not those of the plan; "
        + "; ".join(parts)
        + '. A pass changed node.meta["recompute"] or the graph after the plan was made: run it '
        "before configure_ac decides, or state its wish as a rule"
    )


def _listed(names: list[str], most: int = 20) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
