"""The joint graph cut in two where the plan says, once.

The cut is ours and the extraction PyTorch's. PyTorch's min-cut reads a MUST_SAVE tag as "do not
recompute" and may keep a cheaper value further down instead, or the tag's node not at all; it merges
equal nodes, moves boundaries by ``ac_graph_id`` and lets collectives in by rules of its own. A plan that
is shown to the user must be what runs, so the saved set is derived here from the tags by the closure that
made the plan, handed to PyTorch's ``_extract_fwd_bwd_modules`` (which keeps AOTAutograd's order of
saved tensors and symbolic sizes), and compared with what came out.

Extraction leaves in each graph whatever can be computed there and that FX holds to be impure: waits of
collectives that nobody wants, random draws whose result was saved. Both graphs are therefore reduced to
the orders of `graph/liveness.py`, and backward is put into its order, which is that of the prediction.

Random operators that are recomputed draw the same numbers again: PyTorch's ``functionalize_rng_ops`` saves
the generator's state in forward and restores it around the second draw (CPU), or keeps a second generator
in step (CUDA).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch_partition as private
from ..errors import PartitionError
from ..graph.facts import Facts
from ..graph.liveness import backward_order, forward_order
from ..recompute.plan import RecomputePlan
from ..recompute.tags import read_tags
from ..recompute.verify import check_saved, closure


def partition(
    gm: fx.GraphModule,
    facts: Facts,
    plan: RecomputePlan,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut `gm` into a forward and a backward graph that keep exactly what `plan` saves.

    Args:
        gm: joint graph with the tags of `write_tags`; nodes without readers may have been removed
            since, nothing else.
        facts: of `gm`.
        plan: decided on `facts`; used for the check alone, the cut follows the tags.
        num_fwd_outputs: how many leading results are forward's.
        static_lifetime_input_indices: inputs that outlive a step (AOTAutograd's word).

    Raises:
        PartitionError: what would be kept is not what was planned, or the graph is another one.
    """
    by_name = {n.name: n for n in gm.graph.nodes}
    _check_same_graph(by_name, facts)
    saved, saved_inputs = closure(facts, read_tags(gm, facts))
    # before the work of extraction, and in the plan's own words
    check_saved(_names(facts, plan.saved), _names(facts, saved))
    kept = [by_name[name] for name in _names(facts, (*saved_inputs, *saved))]
    sizes = [n for n in kept if _is_size(n)]
    tensors = [n for n in kept if not _is_size(n)]
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    static = {holders[i] for i in static_lifetime_input_indices or ()}
    forward, backward = private._extract_fwd_bwd_modules(
        gm,
        tensors,
        sizes,  # grows by the symbols that saved tensors mention
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=static,
    )
    ahead = facts.prefetch_bytes is not None
    _reduce(forward, _names(facts, forward_order(facts, saved)), reorder=ahead)
    _reduce(backward, _names(facts, backward_order(facts, saved)), reorder=True)
    _check_realised(facts, plan, backward)
    if any(facts.values[i].random for i in backward_order(facts, saved)):
        forward, backward = _replay_random(gm, forward, backward, len(sizes))
    return forward, backward


def _names(facts: Facts, indices: Collection[int]) -> list[str]:
    return [facts.values[i].name for i in indices]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _check_same_graph(by_name: dict[str, fx.Node], facts: Facts) -> None:
    known = {v.name for v in facts.values}
    if new := [n for n in by_name if n not in known]:
        raise PartitionError(
            f"the graph has {len(new)} nodes that the plan does not know ({', '.join(new[:10])}): "
            "it was rewritten after the plan was made. Make the plan after the last rewrite"
        )


def _check_realised(facts: Facts, plan: RecomputePlan, backward: fx.GraphModule) -> None:
    expected = set(_names(facts, (*plan.saved, *plan.saved_inputs)))
    free = {v.name for v in facts.values if v.role == "tangent"}
    realised = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        # symbols are bound for their own sake, whether or not the graph reads them
        if node.name in free or (node.name not in expected and _is_size(node)):
            continue
        realised.add(node.name)
    check_saved(expected, realised)


def _reduce(gm: fx.GraphModule, order: list[str], *, reorder: bool) -> None:
    """Remove what is not in `order`, and bring the rest into it; an in-place pass, linear.

    Raises:
        PartitionError: `order` asks for a node that is not there.
    """
    graph = gm.graph
    computed = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    wanted = set(order)
    for node in reversed(computed):
        if node.name not in wanted and not node.users:  # a symbol's binding may be a result
            graph.erase_node(node)
    there = {n.name: n for n in computed if n.name in wanted}
    if missing := [name for name in order if name not in there]:
        raise PartitionError(
            f"extraction left out {', '.join(missing[:10])}, which the plan computes here: "
            "the graph does not have the sides that its tags say. Please report it"
        )
    if reorder:
        output = graph.output_node()
        for name in order:
            output.prepend(there[name])
    graph.lint()
    gm.recompile()


def _replay_random(
    gm: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, num_sizes: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    with private.fake_mode_of(gm):  # where a fake state for the graph's metadata is made
        result: Any = private.functionalize_rng_ops(gm, forward, backward, num_sizes)
    return result[0], result[1]
