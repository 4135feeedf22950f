"""Scopes: which nodes of the captured graph were entered together, and what is asked of each.

A *scope* is one entry of an `ac_region`, or one region of `torch.utils.checkpoint`. Of the scopes
that hold a node the innermost speaks first. What enters a scope that recomputes is kept, as a
checkpoint keeps its inputs: this is weaker than an operator that the user named, and than a scope
around both, but stronger than "recompute the rest" of the scope before it. Without that, a model
whose every layer is a region would be recomputed from its first layer on, all at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..annotate import REGION_PREFIX, RegionSpec, read_annotation
from ..errors import HintError
from ..policies import Selector
from .catalog import Captured, base_of, is_view, selected
from .plan import Action, Origin, Wish

_CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointWish(Wish):
    """A wish read from tags of `torch.utils.checkpoint`, which stays when AC of ours is off."""


@dataclass(frozen=True, eq=False)
class Scope:
    """Nodes that were entered together, and what is asked of each.

    Attributes:
        nodes: names of its nodes, views included.
        own: by node name, the wish, and whether the user named the operator in it; a value that is
            only viewed in the scope is asked for here too where the view has a name.
        entering: the wish for what enters, or None where nothing of it is recomputed.
        rest: the wish for what no selector is about, or None where it is left to later parts.
        spec: of the region; None for a checkpoint.
    """

    nodes: frozenset[str]
    own: Mapping[str, tuple[Wish, bool]]
    entering: Wish | None
    rest: Wish | None = None
    spec: RegionSpec | None = None


def spoken_of(name: str, scopes: Iterable[Scope]) -> list[tuple[Wish, bool]]:
    """What is asked of a node, innermost first.

    A region and a checkpoint of the very same nodes do not show which one is inside: there an
    operator that the policy of the checkpoint named goes first.
    """

    def order(scope: Scope) -> tuple[int, int]:
        wish, named = scope.own[name]
        tagged = isinstance(wish, CheckpointWish)
        return len(scope.nodes), (-1 if named else 1) if tagged else 0

    return [s.own[name] for s in sorted((s for s in scopes if name in s.own), key=order)]


def regions_of(
    nodes: Mapping[str, torch.fx.Node],
) -> dict[int, tuple[RegionSpec, list[torch.fx.Node]]]:
    """By the number of the entry, which grows inwards: the spec and its nodes."""
    found: dict[int, tuple[RegionSpec, list[torch.fx.Node]]] = {}
    for node in nodes.values():
        for key, value in node.meta.get("custom", {}).items():
            if isinstance(key, str) and key.startswith(REGION_PREFIX):
                uid = int(key.removeprefix(REGION_PREFIX))
                found.setdefault(uid, (read_annotation(value), []))[1].append(node)
    return found


def region_scope(spec: RegionSpec, held: Sequence[Captured]) -> Scope:
    """What one entry of a region asks of the values in it.

    Raises:
        HintError: two names of the region, one saved and one recomputed, are of one value.
    """
    asked: list[tuple[Selector, Action]] = [(s, "save") for s in spec.save]
    asked += [(s, "recompute") for s in spec.recompute]
    own: dict[str, tuple[Wish, bool]] = {}
    said: dict[str, tuple[Selector, Action]] = {}
    for selector, action in sorted(asked, key=lambda pair: pair[0].rank):
        for value in selected(selector, held):
            if not value.base:
                continue
            first, earlier = said.setdefault(value.base, (selector, action))
            if earlier != action and first.is_name and selector.is_name:
                raise HintError(
                    f"{spec.label} at {spec.source} contradicts itself: {earlier}={first} and "
                    f"{action}={selector} are names of one value, {value.base}, at {value.source}. "
                    "Remove one; views of a value are kept or recomputed with it"
                )
            reason = f"{action}s {selector}" + (", a view of it" if value.is_view else "")
            own.setdefault(value.base, (_region_wish(spec, action, reason), True))
    wish = None
    if spec.otherwise != "auto":
        rest = "the rest" if spec.save or spec.recompute else "all of it"
        action = "save" if spec.otherwise == "save" else "recompute"
        wish = _region_wish(spec, action, f"{action}s {rest}")
        for value in held:
            if not value.is_view:
                own.setdefault(value.name, (wish, False))
    recomputes = spec.otherwise == "recompute" or (
        bool(spec.recompute) and spec.otherwise == "save"
    )
    entering = None
    if recomputes:
        entering = Wish("save", Origin.HINT, f"enters {spec.label}", spec.source, spec.prefer)
    return Scope(frozenset(v.name for v in held), own, entering, wish, spec)


def _region_wish(spec: RegionSpec, action: Action, reason: str) -> Wish:
    return Wish(action, Origin.HINT, f"{spec.label} {reason}", spec.source, spec.prefer)


def checkpoint_scopes(nodes: Mapping[str, torch.fx.Node]) -> list[Scope]:
    by_id: dict[Any, list[torch.fx.Node]] = defaultdict(list)
    for node in nodes.values():
        if isinstance(node.meta.get("recompute"), CheckpointPolicy):
            by_id[node.meta.get("ac_graph_id")].append(node)
    return [_checkpoint_scope(held) for held in by_id.values()]


def _checkpoint_scope(nodes: list[torch.fx.Node]) -> Scope:
    tags = {node.meta["recompute"] for node in nodes}
    # a plain checkpoint writes PREFER_RECOMPUTE on all of its nodes, and means it
    selective = tags != {CheckpointPolicy.PREFER_RECOMPUTE}
    what = f"a selective {_CHECKPOINT}" if selective else _CHECKPOINT
    own: dict[str, tuple[Wish, bool]] = {}
    for node in nodes:
        said = _POLICIES.get(node.meta["recompute"].name)
        if said is None or is_view(node):
            continue
        action, prefer = said
        reason = f"{what} {action}s it" + (f" ({node.meta['recompute'].name})" if selective else "")
        own[node.name] = (
            CheckpointWish(action, Origin.HINT, reason, prefer=prefer and selective),
            selective and not prefer,
        )
    entering = CheckpointWish("save", Origin.HINT, f"enters {what}")
    rest = CheckpointWish("recompute", Origin.HINT, f"{what} recomputes what moves in it")
    inside = frozenset(n.name for n in nodes)
    # the policy of a selective one was not asked about collectives: they are left to later parts
    return Scope(inside, own, entering, None if selective else rest)


# The tags of offloading to the CPU say nothing about saving on the device.
_POLICIES: Mapping[str, tuple[Action, bool]] = {
    "MUST_SAVE": ("save", False),
    "PREFER_SAVE": ("save", True),
    "MUST_RECOMPUTE": ("recompute", False),
    "PREFER_RECOMPUTE": ("recompute", True),
}


def keep_what_enters(
    nodes: Mapping[str, torch.fx.Node],
    scopes: Iterable[Scope],
    scopes_of: Mapping[str, list[Scope]],
    spoken: dict[str, list[tuple[Wish, bool]]],
) -> None:
    """Add to `spoken` a wish for each value that a scope reads and that is made outside of it."""
    place = {name: i for i, name in enumerate(nodes)}
    for scope in scopes:
        if scope.entering is None:
            continue
        # in graph order, so that equal graphs give equal wishes
        held = sorted(scope.nodes, key=place.__getitem__)
        read = {base_of(i).name: None for n in held for i in nodes[n].all_input_nodes}
        for name in read:
            if name not in nodes or name in scope.nodes:
                continue
            around = [s for s in scopes_of.get(name, ()) if scope.nodes < s.nodes and name in s.own]
            asked = spoken.setdefault(name, [])
            at = len(asked)
            if not any(s.own[name][0].action == "recompute" for s in around):
                at = next((i for i, (_, named) in enumerate(asked) if not named), at)
            asked.insert(at, (scope.entering, False))
