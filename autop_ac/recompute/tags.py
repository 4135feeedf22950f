"""A plan written on the graph as PyTorch's own tags, so that its tools and partitioners read it too.

Three of PyTorch's rules shape what is written (torch/_functorch/partitioners.py, 2.13):

- only ``MUST_SAVE`` and ``MUST_RECOMPUTE`` are ever heeded as they stand;
- a recompute node with a recompute user of a larger ``ac_graph_id`` turns into ``MUST_SAVE``: all get
  the same id, so that no boundary is seen where the plan has none;
- a getitem may not be marked against its producer: each node carries the action that holds for it.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import PartitionError
from ..graph.facts import Facts
from .plan import Action, RecomputePlan
from .verify import effective_action

_OURS = ("recompute", "ac_graph_id", "has_backward_hook", "memory_budget")
_ONE_REGION = 0


def actions_of(plan: RecomputePlan) -> dict[int, Action]:
    """The bare actions of a plan, by value index."""
    return {i: d.action for i, d in plan.decisions.items()}


def write_tags(gm: fx.GraphModule, facts: Facts, plan: RecomputePlan) -> None:
    """Set ``node.meta["recompute"]`` on every forward node of `gm`, and on no other."""
    index = {v.name: v.index for v in facts.values}
    actions = actions_of(plan)
    for node in gm.graph.nodes:
        if node.name not in index:
            raise PartitionError(
                f"node {node.name} ({node.target}) is not among the facts that the plan was made "
                "from: the graph was changed in between. Collect the facts after the last rewrite"
            )
        for key in _OURS:
            node.meta.pop(key, None)
        i = index[node.name]
        if facts.values[i].side != "forward":
            continue
        if effective_action(facts, actions, i) == "recompute":
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _ONE_REGION
        else:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def read_tags(gm: fx.GraphModule, facts: Facts) -> dict[int, Action]:
    """The actions that the tags of `gm` ask for, as they stand now; untagged nodes are left out."""
    index = {v.name: v.index for v in facts.values}
    actions: dict[int, Action] = {}
    for node in gm.graph.nodes:
        policy = node.meta.get("recompute")
        if policy is None or node.name not in index:
            continue
        again = policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
        actions[index[node.name]] = "recompute" if again else "save"
    return actions
