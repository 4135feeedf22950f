"""From what the user wrote in the model and in `ACConfig` to wishes about values.

Hints are resolved on the captured graph, before any rewrite of ours, where operators are still
those that the user named (`scopes` says whose word holds where); each wish then follows its value,
by `Value.origin`, to the local graph (`carry`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ..capture.joint import Port
from ..capture.marks import names_of
from ..capture.names import block_of_path
from ..graph.facts import Facts, Value
from .carry import carry, is_inserted, root_of
from .catalog import Captured, by_name, make_catalog
from .messages import region_messages
from .plan import Wish
from .rules import rule_wishes
from .scopes import (
    CheckpointWish,
    Scope,
    checkpoint_scopes,
    keep_what_enters,
    region_scope,
    regions_of,
    spoken_of,
)

__all__ = [
    "CheckpointWish",
    "ResolvedHints",
    "resolve_hints",
    "root_of",
    "rule_wishes",
    "wishes_for_values",
]


@dataclass(frozen=True)
class ResolvedHints:
    """Wishes by captured node name, the strongest first, and what to tell the user about them.

    `catalog` holds the captured forward values, for rules to choose from; `scopes` the regions and
    checkpoints, the innermost first, for what sharding inserts in them.
    """

    wishes: Mapping[str, tuple[Wish, ...]] = field(default_factory=lambda: MappingProxyType({}))
    messages: tuple[str, ...] = ()
    catalog: tuple[Captured, ...] = ()
    scopes: tuple[Scope, ...] = ()


def resolve_hints(
    gm: torch.fx.GraphModule, placeholders: Mapping[str, Port], prefix: str = ""
) -> ResolvedHints:
    """Read the hints of a captured joint graph, on its forward nodes only.

    Args:
        gm: the captured joint graph, not rewritten.
        placeholders: what each placeholder is, by name; tells tangents from inputs.
        prefix: path of the user's model inside what was traced.

    Raises:
        HintError: hints of one region contradict each other.
    """
    nodes = _forward_nodes(gm, placeholders)
    named_inputs = [n for n in gm.graph.nodes if n.op == "placeholder" and names_of(n)]
    catalog = make_catalog((*named_inputs, *nodes.values()), prefix)
    entries = by_name(catalog)
    regions = {
        uid: (spec, [entries[n.name] for n in held])
        for uid, (spec, held) in regions_of(nodes).items()
    }
    checkpoints = checkpoint_scopes(nodes)
    # inner scopes are the smaller ones; of two with the same nodes the later entered is inside
    ordered = [
        region_scope(spec, held) for _, (spec, held) in sorted(regions.items(), reverse=True)
    ]
    ordered = sorted([*ordered, *checkpoints], key=lambda scope: len(scope.nodes))
    scopes_of: dict[str, list[Scope]] = defaultdict(list)
    for scope in ordered:
        for name in {**dict.fromkeys(scope.nodes), **scope.own}:
            scopes_of[name].append(scope)
    spoken = {name: spoken_of(name, scopes_of[name]) for name in nodes if name in scopes_of}
    keep_what_enters(nodes, ordered, scopes_of, spoken)
    wishes = {
        name: tuple(dict.fromkeys(wish for wish, _ in spoken[name]))
        for name in nodes
        if spoken.get(name)
    }
    messages = region_messages(regions, catalog)
    return ResolvedHints(MappingProxyType(wishes), messages, catalog, tuple(ordered))


def _forward_nodes(
    gm: torch.fx.GraphModule, placeholders: Mapping[str, Port]
) -> dict[str, torch.fx.Node]:
    backward: set[torch.fx.Node] = set()
    forward = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            port = placeholders.get(node.name)
            tangent = port.kind == "tangent" if port else node.name.startswith("tangents_")
        else:
            tangent = node.meta.get("partitioner_tag") == "is_backward"
        if tangent or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            forward[node.name] = node
    return forward


def wishes_for_values(facts: Facts, resolved: ResolvedHints) -> Mapping[int, tuple[Wish, ...]]:
    """Carry wishes about captured nodes to the local values that compute them, by `Value.origin`.

    Where several local values compute one captured node, recompute holds for all of them and save
    for the last. Where that one is read by inserted redistributions only, the save moves on to
    their end: the user's value, on this device, is what comes out of them. Recompute holds for what
    redistributions make of the value too: a gathered copy that is kept would be the value, kept.
    What is inserted for a node in a scope is in the scope: a selector of the region that is about its
    collective goes first, and what is left over follows the rest of the scope.
    """
    carried = dict(carry(facts, resolved.wishes))
    inserted: dict[str, list[Value]] = defaultdict(list)
    for value in facts.forward:
        # gathers of parameters have a contract of their own
        if (
            is_inserted(value)
            and not value.parameter
            and root_of(facts, value.index) == value.index
        ):
            inserted[value.serves].append(value)
    for scope in resolved.scopes:
        moves = [v for n in scope.nodes if n in inserted for v in inserted[n]]
        moves.sort(key=lambda v: v.index)
        named = _named_moves(scope, moves)
        for value in moves:
            first = (named[value.name],) if value.name in named else ()
            rest = (scope.rest,) if scope.rest else ()
            wishes = (*first, *carried.get(value.index, ()), *rest)
            if wishes:
                carried[value.index] = tuple(dict.fromkeys(wishes))
    return MappingProxyType(dict(sorted(carried.items())))


def _named_moves(scope: Scope, moves: list[Value]) -> dict[str, Wish]:
    """The collectives among what was inserted in a region that its selectors are about."""
    if scope.spec is None:
        return {}
    values = [
        Captured(v.name, v.op, v.module, block_of_path(v.module), base=v.name)
        for v in moves
        if v.collective
    ]
    own = region_scope(scope.spec, values).own
    return {name: wish for name, (wish, named) in own.items() if named}
