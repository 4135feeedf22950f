"""What PyTorch's min-cut partitioner would keep by itself: the decision where nobody decides.

It runs on a copy without tags, before any tag of ours is written. Gathers of parameters are marked for
recompute on the copy, since the contract holds whatever else is asked and the cut depends on it.

Min-cut may keep what autograd made, as long as no tangent enters: the ``cos(x)`` of sin's backward, a
transposed weight. To us these are backward values and are computed there, so what they read is kept
in their stead. It may keep a view or one of several results: the value whose decision these follow is
named beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_partition as private
from ..graph.collect import follows_of, sides_of

# the tags of others, and the budget annotation that lives in "custom"
_DROPPED = ("recompute", "ac_graph_id", "has_backward_hook", "memory_budget", "custom")
# cse would merge nodes and lose names; the others change the cut behind the user's back
PINNED: Mapping[str, object] = {
    "activation_memory_budget": 1.0,
    "aggressive_recomputation": False,
    "cse": False,
    "enable_activation_offloading": False,
    "_sync_decision_cross_ranks": False,
}


def warn_of_pytorchs_budget() -> None:
    """PyTorch's own memory budget is pinned, whether or not its min-cut is asked: say so where one is set."""
    budget = private.functorch_config.activation_memory_budget
    if budget != 1.0:
        warnings.warn(
            f"activation_memory_budget={budget} of functorch's config is not used here: set "
            "configure_ac(memory_budget=...) instead",
            UserWarning,
            stacklevel=3,
        )


def default_saved(
    gm: fx.GraphModule,
    recomputed_names: frozenset[str],
    num_fwd_outputs: int,
    settings: Mapping[str, object] = PINNED,
) -> frozenset[str]:
    """Names of the nodes that min-cut keeps from forward to backward; graph inputs are not named.

    Args:
        gm: joint graph; it is left as it is.
        recomputed_names: nodes marked for recompute beforehand (the all-gather contract).
        num_fwd_outputs: how many leading results are forward's.
        settings: of functorch, in force during the cut.
    """
    copied, old_name = _copy(gm, recomputed_names)
    with private.functorch_config.patch(**settings), private.fake_mode_of(gm):
        forward, _ = private.min_cut_rematerialization_partition(
            copied, None, num_fwd_outputs=num_fwd_outputs
        )
    results = pytree.arg_tree_leaves(*forward.graph.output_node().args)[num_fwd_outputs:]
    # what is not a node of the joint graph is a random state saved for a replay
    kept = {old_name[r.name] for r in results if isinstance(r, fx.Node) and r.name in old_name}
    return _forward_names(gm, kept, num_fwd_outputs)


def _forward_names(gm: fx.GraphModule, kept: set[str], num_fwd_outputs: int) -> frozenset[str]:
    """The kept values in our terms: forward values, and those whose decision they follow."""
    nodes = list(gm.graph.nodes)
    results = pytree.arg_tree_leaves(*nodes[-1].args)[:num_fwd_outputs]
    sides = sides_of(nodes, {}, [r for r in results if isinstance(r, fx.Node)])
    followed = follows_of(nodes)
    seen: set[fx.Node] = set()
    work = [n for n in nodes if n.name in kept]
    while work:
        node = work.pop()
        if node in seen:
            continue
        seen.add(node)
        if sides[node] == "backward":
            work.extend(node.all_input_nodes)
        elif sides[node] == "forward" and followed[node] is not None:
            work.append(followed[node])
    return frozenset(n.name for n in seen if sides[n] == "forward")


def _copy(
    gm: fx.GraphModule, recomputed_names: frozenset[str]
) -> tuple[fx.GraphModule, dict[str, str]]:
    """The graph again with its own metadata dicts, tags dropped, and new names to old ones.

    Fake values are shared with the original: copying them would part views from their bases.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
        for key in _DROPPED:
            new[node].meta.pop(key, None)
        if node.name in recomputed_names:
            new[node].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            new[node].meta["ac_graph_id"] = 0
    return fx.GraphModule(gm, graph), {c.name: n.name for n, c in new.items()}
