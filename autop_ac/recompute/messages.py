"""What to tell the user of hints and rules that match nothing, or some of a kind and not its siblings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import torch

from ..annotate import RegionSpec
from ..policies import Selector, groups_covering, nearest_selector, packet_of, short_name
from .plan import Action
from .scopes import is_view, matching

_DONE: Mapping[Action, str] = {"save": "kept", "recompute": "recomputed"}


def region_messages(
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
            (views if is_view(node) else ops)[spec][op] += 1
            if not is_view(node) and innermost[node.name] == uid:
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
            messages += unmatched(where, action, selectors, ops[spec], views[spec], "this region")
            if spec.otherwise != action:
                messages += siblings(where, action, selectors, both, ops[spec], governed[spec],
                                      "this region")  # fmt: skip
    return tuple(messages)


def unmatched(
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


def siblings(
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
                if whole.matches(op) and not matching(all_selectors, op):
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
