"""From what the user wrote in the model and in `ACConfig` to wishes about values.

Hints are resolved on the captured graph, before any rewrite of ours, where operators are still
those that the user named; each wish then follows its value, by `Value.origin`, to the local graph.

A *scope* is one entry of an `ac_region`, or one region of `torch.utils.checkpoint`. Of the scopes
that hold a node the innermost speaks first. What enters a scope that recomputes is kept, as a
checkpoint
keeps its inputs: this is weaker than an operator that the user named, and than a scope around
both, but stronger than "recompute the rest" of the scope before it. Without that, a model whose
every layer is a region would be recomputed from its first layer on, all at once.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..annotate import REGION_PREFIX, RegionSpec, read_annotation
from ..capture.joint import Port
from ..config import ACConfig
from ..graph.facts import Facts, Value
from ..policies import Selector, groups_covering, nearest_selector, packet_of, short_name
from .plan import Action, Origin, Wish

_DONE: Mapping[Action, str] = {"save": "kept", "recompute": "recomputed"}
_CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointWish(Wish):
    """A wish read from tags of `torch.utils.checkpoint`, which stays when AC of ours is off."""


@dataclass(frozen=True)
class ResolvedHints:
    """Wishes by captured node name, the strongest first, and what to tell the user about them."""

    wishes: Mapping[str, tuple[Wish, ...]] = field(default_factory=lambda: MappingProxyType({}))
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Scope:
    """Nodes that were entered together, and what is asked of each.

    Attributes:
        nodes: names of its nodes, views included.
        own: by node name, the wish, and whether the user named the operator in it.
        entering: the wish for what enters, or None where nothing of it is recomputed.
    """

    nodes: frozenset[str]
    own: Mapping[str, tuple[Wish, bool]]
    entering: Wish | None


def resolve_hints(gm: torch.fx.GraphModule, placeholders: Mapping[str, Port]) -> ResolvedHints:
    """Read the hints of a captured joint graph, on its forward nodes only.

    Args:
        gm: the captured joint graph, not rewritten.
        placeholders: what each placeholder is, by name; tells tangents from inputs.
    """
    nodes = _forward_nodes(gm, placeholders)
    regions = _regions(nodes)
    checkpoints = _checkpoint_scopes(nodes)
    # inner scopes are the smaller ones; of two with the same nodes the later entered is inside
    ordered = [
        _region_scope(spec, held) for _, (spec, held) in sorted(regions.items(), reverse=True)
    ]
    ordered = sorted([*ordered, *checkpoints], key=lambda scope: len(scope.nodes))
    scopes_of: dict[str, list[_Scope]] = defaultdict(list)
    for scope in ordered:
        for name in scope.nodes:
            scopes_of[name].append(scope)
    spoken = {name: _spoken(name, scopes_of[name]) for name in nodes if name in scopes_of}
    _keep_what_enters(nodes, ordered, scopes_of, spoken)
    wishes = {
        name: tuple(dict.fromkeys(wish for wish, _ in spoken[name]))
        for name in nodes
        if spoken.get(name)
    }
    return ResolvedHints(MappingProxyType(wishes), _region_messages(regions))


def _spoken(name: str, scopes: Iterable[_Scope]) -> list[tuple[Wish, bool]]:
    """What is asked of a node, innermost first.

    A region and a checkpoint of the very same nodes do not show which one is inside: there an
    operator that the policy of the checkpoint named goes first.
    """

    def order(scope: _Scope) -> tuple[int, int]:
        wish, named = scope.own[name]
        tagged = isinstance(wish, CheckpointWish)
        return len(scope.nodes), (-1 if named else 1) if tagged else 0

    return [s.own[name] for s in sorted((s for s in scopes if name in s.own), key=order)]


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


def _is_view(node: torch.fx.Node) -> bool:
    """Whether it holds no memory of its own, so that it takes the decision of what it reads."""
    if node.target is operator.getitem or node.target is torch.ops.aten._unsafe_view.default:
        return True
    return bool(getattr(node.target, "is_view", False))


def _base(node: torch.fx.Node) -> torch.fx.Node:
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


# ---- scopes -------------------------------------------------------------------------------


def _regions(
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


def _matching(selectors: Iterable[Selector], op: str) -> Selector | None:
    return next((s for s in selectors if s.matches(op)), None)


def _region_scope(spec: RegionSpec, nodes: list[torch.fx.Node]) -> _Scope:
    own = {}
    for node in nodes:
        if not _is_view(node) and (said := _region_wish(spec, str(node.target))) is not None:
            own[node.name] = said
    recomputes = spec.otherwise == "recompute" or (
        bool(spec.recompute) and spec.otherwise == "save"
    )
    entering = None
    if recomputes:
        entering = Wish("save", Origin.HINT, f"enters {spec.label}", spec.source, spec.prefer)
    return _Scope(frozenset(n.name for n in nodes), own, entering)


def _region_wish(spec: RegionSpec, op: str) -> tuple[Wish, bool] | None:
    def wish(action: Action, reason: str) -> Wish:
        return Wish(action, Origin.HINT, f"{spec.label} {reason}", spec.source, spec.prefer)

    if chosen := _matching(spec.save, op):
        return wish("save", f"saves {chosen}"), True
    if chosen := _matching(spec.recompute, op):
        return wish("recompute", f"recomputes {chosen}"), True
    if spec.otherwise == "auto":
        return None
    rest = "the rest" if spec.save or spec.recompute else "all of it"
    if spec.otherwise == "save":
        return wish("save", f"saves {rest}"), False
    return wish("recompute", f"recomputes {rest}"), False


def _checkpoint_scopes(nodes: Mapping[str, torch.fx.Node]) -> list[_Scope]:
    by_id: dict[Any, list[torch.fx.Node]] = defaultdict(list)
    for node in nodes.values():
        if isinstance(node.meta.get("recompute"), CheckpointPolicy):
            by_id[node.meta.get("ac_graph_id")].append(node)
    return [_checkpoint_scope(held) for held in by_id.values()]


def _checkpoint_scope(nodes: list[torch.fx.Node]) -> _Scope:
    tags = {node.meta["recompute"] for node in nodes}
    # a plain checkpoint writes PREFER_RECOMPUTE on all of its nodes, and means it
    selective = tags != {CheckpointPolicy.PREFER_RECOMPUTE}
    what = f"a selective {_CHECKPOINT}" if selective else _CHECKPOINT
    own: dict[str, tuple[Wish, bool]] = {}
    for node in nodes:
        said = _POLICIES.get(node.meta["recompute"].name)
        if said is None or _is_view(node):
            continue
        action, prefer = said
        reason = f"{what} {action}s it" + (f" ({node.meta['recompute'].name})" if selective else "")
        own[node.name] = (
            CheckpointWish(action, Origin.HINT, reason, prefer=prefer and selective),
            selective and not prefer,
        )
    entering = CheckpointWish("save", Origin.HINT, f"enters {what}")
    return _Scope(frozenset(n.name for n in nodes), own, entering)


# The tags of offloading to the CPU say nothing about saving on the device.
_POLICIES: Mapping[str, tuple[Action, bool]] = {
    "MUST_SAVE": ("save", False),
    "PREFER_SAVE": ("save", True),
    "MUST_RECOMPUTE": ("recompute", False),
    "PREFER_RECOMPUTE": ("recompute", True),
}


def _keep_what_enters(
    nodes: Mapping[str, torch.fx.Node],
    scopes: Iterable[_Scope],
    scopes_of: Mapping[str, list[_Scope]],
    spoken: dict[str, list[tuple[Wish, bool]]],
) -> None:
    """Add to `spoken` a wish for each value that a scope reads and that is made outside of it."""
    for scope in scopes:
        if scope.entering is None:
            continue
        # in graph order, so that equal graphs give equal wishes
        read = {_base(i).name: None for n in nodes.values() if n.name in scope.nodes
                for i in n.all_input_nodes}  # fmt: skip
        for name in read:
            if name not in nodes or name in scope.nodes:
                continue
            around = [s for s in scopes_of.get(name, ()) if scope.nodes < s.nodes and name in s.own]
            asked = spoken.setdefault(name, [])
            at = len(asked)
            if not any(s.own[name][0].action == "recompute" for s in around):
                at = next((i for i, (_, named) in enumerate(asked) if not named), at)
            asked.insert(at, (scope.entering, False))


# ---- messages -----------------------------------------------------------------------------


def _region_messages(
    regions: Mapping[int, tuple[RegionSpec, list[torch.fx.Node]]],
) -> tuple[str, ...]:
    """Hints that match nothing, or some of a kind and not its siblings; once per line of the
    user."""
    innermost: dict[str, int] = {}
    for uid, (_, held) in regions.items():
        for node in held:
            innermost[node.name] = max(uid, innermost.get(node.name, 0))
    # every entry of one `with` line together: a layer of a loop is no region of its own to the user
    ops: dict[RegionSpec, Counter[str]] = defaultdict(Counter)
    governed: dict[RegionSpec, Counter[str]] = defaultdict(Counter)
    views: dict[RegionSpec, Counter[str]] = defaultdict(Counter)
    for uid, (spec, held) in sorted(regions.items()):
        for node in held:
            op = str(node.target)
            (views if _is_view(node) else ops)[spec][op] += 1
            if not _is_view(node) and innermost[node.name] == uid:
                governed[spec][op] += 1
    messages = []
    for spec in dict.fromkeys(spec for _, (spec, _) in sorted(regions.items())):
        where = f"{spec.label} at {spec.source}" if spec.source else spec.label
        both = (*spec.save, *spec.recompute)
        sides: tuple[tuple[Action, tuple[Selector, ...]], ...] = (
            ("save", spec.save),
            ("recompute", spec.recompute),
        )
        for action, selectors in sides:
            messages += _unmatched(where, action, selectors, ops[spec], views[spec], "this region")
            if spec.otherwise != action:
                messages += _siblings(where, action, selectors, both, ops[spec], governed[spec],
                                      "this region")  # fmt: skip
    return tuple(messages)


def _unmatched(
    where: str,
    action: Action,
    selectors: Iterable[Selector],
    ops: Mapping[str, int],
    views: Mapping[str, int],
    place: str,
) -> list[str]:
    messages = []
    for selector in selectors:
        if any(selector.matches(op) for op in ops):
            continue
        if count := sum(n for op, n in views.items() if selector.matches(op)):
            messages.append(
                f"{where}: {action}={selector} is ignored: its {count} results are views, which "
                "hold no memory and follow what they view"
            )
            continue
        near = nearest_selector(selector, ops)
        total = sum(ops.values())
        messages.append(
            f"{where}: {action}={selector} matches none of the {total} operators of {place}"
            + (f"; {near}" if near else "")
        )
    return messages


def _siblings(
    where: str,
    action: Action,
    selectors: Iterable[Selector],
    all_selectors: tuple[Selector, ...],
    ops: Mapping[str, int],
    governed: Mapping[str, int],
    place: str,
) -> list[str]:
    """``3 mm kept, 9 addmm of this region are not; MATMUL covers both``."""
    messages = []
    for selector in selectors:
        hit = sum(n for op, n in ops.items() if selector.matches(op))
        for group in groups_covering(selector.packets) if hit else ():
            whole = Selector(group.name)
            missed: Counter[str] = Counter()
            for op, count in governed.items():
                if whole.matches(op) and not _matching(all_selectors, op):
                    missed[short_name(packet_of(op))] += count
            if missed:
                rest = ", ".join(f"{n} {name}" for name, n in sorted(missed.items()))
                are = "is" if missed.total() == 1 else "are"
                covers = "both" if len(missed) == 1 else "all"
                messages.append(
                    f"{where}: {hit} {short_name(selector.text)} {_DONE[action]}, {rest} of "
                    f"{place} {are} not; {group.name} covers {covers}"
                )
    return messages


# ---- to local values ----------------------------------------------------------------------


def wishes_for_values(facts: Facts, resolved: ResolvedHints) -> Mapping[int, tuple[Wish, ...]]:
    """Carry wishes about captured nodes to the local values that compute them, by `Value.origin`.

    Where several local values compute one captured node, recompute holds for all of them and save
    for the last. Where that one is read by inserted redistributions only, the save moves on to
    their end: the user's value, on this device, is what comes out of them.
    """
    return _carry(facts, resolved.wishes)


def rule_wishes(
    facts: Facts, config: ACConfig
) -> tuple[Mapping[int, tuple[Wish, ...]], tuple[str, ...]]:
    """The rules of `config` on local values, by the operator that was captured, and messages.

    Inserted collectives were in no captured graph and are known by their own operator.
    """
    by_origin: dict[str, tuple[Wish, ...]] = {}
    direct: dict[int, tuple[Wish, ...]] = {}
    ops: Counter[str] = Counter()
    views: Counter[str] = Counter()
    for value in facts.forward:
        op = value.captured_op or (value.op if value.collective else "")
        if not op:
            continue
        (ops if value.follows is None or value.collective else views)[op] += 1
        wish = _rule_wish(config, op)
        if wish is None or value.follows is not None:
            continue
        if value.captured_op and value.origin:
            by_origin[value.origin] = (wish,)
        else:
            direct[value.index] = (wish,)
    carried = dict(_carry(facts, by_origin))
    for index, wishes in direct.items():
        carried[index] = tuple(dict.fromkeys((*wishes, *carried.get(index, ()))))
    messages = []
    both = (*config.saved_selectors, *config.recomputed_selectors)
    sides: tuple[tuple[Action, tuple[Selector, ...]], ...] = (
        ("save", config.saved_selectors),
        ("recompute", config.recomputed_selectors),
    )
    for action, selectors in sides:
        messages += _unmatched("ACConfig", action, selectors, ops, views, "the model")
        messages += _siblings("ACConfig", action, selectors, both, ops, ops, "the model")
    return MappingProxyType(carried), tuple(messages)


def _rule_wish(config: ACConfig, op: str) -> Wish | None:
    if chosen := _matching(config.saved_selectors, op):
        return Wish("save", Origin.RULE, f"ACConfig saves {chosen}")
    if chosen := _matching(config.recomputed_selectors, op):
        return Wish("recompute", Origin.RULE, f"ACConfig recomputes {chosen}")
    return None


def root_of(facts: Facts, index: int) -> int:
    """The value whose decision this one takes, following `Value.follows` among forward values."""
    while (up := facts.values[index].follows) is not None and facts.values[up].side == "forward":
        index = up
    return index


def _carry(facts: Facts, wishes: Mapping[str, tuple[Wish, ...]]) -> Mapping[int, tuple[Wish, ...]]:
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
        for wish in wishes[origin]:
            for i in (kept,) if wish.action == "save" else computed:
                carried[i].append(wish)
    return MappingProxyType({i: tuple(dict.fromkeys(w)) for i, w in sorted(carried.items())})


def _end_of_redistribution(facts: Facts, readers: Mapping[int, list[int]], start: int) -> int:
    """Where a saved value lives on this device: itself, or the end of the moves that alone read
    it."""

    def inserted(value: Value) -> bool:
        return value.side == "forward" and not value.origin and bool(value.serves)

    seen, stack, moved, ends = {start}, [start], False, set()
    while stack:
        index = stack.pop()
        onward = [facts.values[r] for r in readers.get(index, ())]
        if index != start and inserted(facts.values[index]):
            if not any(inserted(v) for v in onward):
                ends.add(index)
                continue
            moved = True
            onward = [v for v in onward if inserted(v)]
        for value in onward:
            # a view of the value is the value; any other reader needs it as it is
            same = value.side == "forward" and root_of(facts, value.index) == start
            if not inserted(value) and not same:
                return start
            moved = moved or inserted(value)
            if value.index not in seen:
                seen.add(value.index)
                stack.append(value.index)
    ends = {root_of(facts, i) for i in ends}
    return ends.pop() if moved and len(ends) == 1 else start
