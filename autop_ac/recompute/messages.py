"""What to tell the user of hints and rules that match nothing, or some of a kind and not its siblings."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..annotate import RegionSpec
from ..policies import Rule, Selector, groups_covering, nearest_selector, packet_of, short_name
from .catalog import Captured, matched, selected
from .plan import Action

_REGION = "this region"
_DONE: Mapping[Action, str] = {"save": "kept", "recompute": "recomputed"}


def region_messages(
    regions: Mapping[int, tuple[RegionSpec, list[Captured]]], catalog: Sequence[Captured]
) -> tuple[str, ...]:
    """Hints that match nothing, or some of a kind and not its siblings; once per line of the user.

    Args:
        regions: by the number of the entry, which grows inwards: the spec and its values.
        catalog: all captured forward values.
    """
    innermost: dict[str, int] = {}
    for uid, (_, held) in regions.items():
        for value in held:
            innermost[value.name] = max(uid, innermost.get(value.name, 0))
    # every entry of one `with` line together: a layer of a loop is no region of its own to the user
    values: dict[RegionSpec, list[Captured]] = defaultdict(list)
    governed: dict[RegionSpec, list[Captured]] = defaultdict(list)
    hits: dict[RegionSpec, Counter[Selector]] = defaultdict(Counter)
    for uid, (spec, held) in sorted(regions.items()):
        values[spec] += held
        governed[spec] += [v for v in held if innermost[v.name] == uid]
        for selector in (*spec.save, *spec.recompute):
            hits[spec][selector] += len(selected(selector, held))
    messages = []
    for spec in values:
        where = f"{spec.label} at {spec.source}" if spec.source else spec.label
        both = (*spec.save, *spec.recompute)
        left = [v for v in governed[spec] if not any(matched(s, (v,)) for s in both)]
        sides: tuple[tuple[Action, tuple[Selector, ...]], ...] = (
            ("save", spec.save),
            ("recompute", spec.recompute),
        )
        for action, selectors in sides:
            for selector in selectors:
                said = f"{where}: {action}={selector}"
                messages += unmatched(said, selector, values[spec], catalog, _REGION)
            if spec.otherwise != action:
                for selector in selectors:
                    hit = hits[spec][selector]
                    messages += siblings(where, action, selector, hit, left, _REGION)
    return tuple(messages)


def unmatched(
    said: str,
    selector: Selector,
    values: Sequence[Captured],
    catalog: Sequence[Captured],
    place: str,
) -> list[str]:
    """What to say of a selector that chooses nothing in a place, in no line or one.

    Args:
        said: how the message begins, ``"ac_region at file.py:12: save=aten.mm"``.
        selector: what was asked for.
        values: what is in the place.
        catalog: all captured forward values.
        place: ``"this region"``.
    """
    if any(v.base for v in matched(selector, values)):
        return []
    own = [v for v in values if not v.is_view]
    if selector.is_collective and place == _REGION:
        return []  # sharding inserts them, or has no need of any: no fault of the hint
    if selector.is_name:
        return [_unnamed(said, selector, own, values, catalog, place)]
    if count := sum(selector.matches(v.op) for v in values):
        return [
            f"{said} is ignored: its {count} results are views, which hold no memory and follow what "
            "they view"
        ]
    near = nearest_selector(selector, [v.op for v in own])
    return [
        f"{said} matches none of the {len(own)} operators of {place}"
        + (f"; {near}" if near else "")
    ]


def _unnamed(
    said: str,
    selector: Selector,
    own: Sequence[Captured],
    values: Sequence[Captured],
    catalog: Sequence[Captured],
    place: str,
) -> str:
    elsewhere = matched(selector, (*values, *catalog))
    if elsewhere and not any(v.base for v in elsewhere):
        return f"{said} is ignored: it names an input or a weight, or a view of one, kept anyway"
    if elsewhere:
        count = sum(bool(v.base) for v in dict.fromkeys(elsewhere))
        return (
            f"{said} matches nothing of {place}: the {count} values of that name are outside of it"
        )
    names = dict.fromkeys(n for v in (*values, *catalog) for n in v.names)
    near = nearest_selector(selector, [v.op for v in own], names)
    return f"{said} is the name of none of the {len(own)} values of {place}" + (
        f"; {near}" if near else ""
    )


def siblings(
    where: str, action: Action, selector: Selector, hit: int, left: Iterable[Captured], place: str
) -> list[str]:
    """``3 mm kept, 9 addmm of this region are not; MATMUL covers both``, in no line or one a group.

    Args:
        where: how the message begins.
        action: what was asked.
        selector: for what.
        hit: how many values it chose.
        left: values of the place that no selector is about.
        place: ``"this region"``.
    """
    messages = []
    for group in groups_covering(selector.packets) if hit else ():
        whole = Selector(group.name)
        missed = Counter(short_name(packet_of(v.op)) for v in matched(whole, left))
        if missed:
            rest = ", ".join(f"{n} {name}" for name, n in sorted(missed.items()))
            are = "is" if missed.total() == 1 else "are"
            covers = "both" if len(missed) == 1 else "all"
            messages.append(
                f"{where}: {hit} {short_name(selector.text)} {_DONE[action]}, {rest} of "
                f"{place} {are} not; {group.name} covers {covers}"
            )
    return messages


def module_unmatched(rule: Rule, catalog: Iterable[Captured]) -> str:
    """What to say of a rule whose glob matches no module."""
    paths: set[str] = set()
    for value in catalog:
        parts = value.module.split(".")
        paths.update(".".join(parts[: i + 1]) for i in range(len(parts)) if value.module)
    globs = sorted({re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in paths})
    near = difflib.get_close_matches(rule.module, [*globs, *sorted(paths)], n=1, cutoff=0.0)
    return f'rule "{rule}": {rule.module} matches none of the {len(paths)} modules' + (
        f"; the nearest is {near[0]}" if near else ""
    )
