"""The total order of precedence, in one place: from what each origin wishes to one decision a
value.

Correctness, the all-gather contract, hints, rules, the automatic part, the default; a value that
follows another (getitem, view, wait) takes the decision of what it follows. Whatever asked for the
other action and was set aside stays with the decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType

from ..graph.facts import Facts, Value
from .hints import CheckpointWish, root_of
from .plan import Decision, Origin, Wish


def decide(
    facts: Facts,
    *,
    contract: frozenset[int],
    hints: Mapping[int, tuple[Wish, ...]],
    rules: Mapping[int, tuple[Wish, ...]],
    auto: Mapping[int, Wish],
    default_saved: frozenset[int],
    reshard_after_forward: bool = True,
    enable: bool = True,
    given_up: Collection[int] = (),
) -> Mapping[int, Decision]:
    """One decision for each forward value, and for no other.

    Args:
        facts: the local graph.
        contract: the chains that gather parameters.
        hints: what hints in the model ask, the strongest first.
        rules: what rules of `ACConfig` ask, the first that matches first.
        auto: what stages ask.
        default_saved: what PyTorch's min-cut keeps without tags.
        reshard_after_forward: gathers of parameters are recomputed; False saves them.
        enable: False sets aside hints of ours, rules and the automatic part; correctness, the
            contract and tags of `torch.utils.checkpoint` stay.
        given_up: roots whose preference stands behind the automatic part, whose limit cannot be
            met with it.
    """
    groups: dict[int, list[Value]] = defaultdict(list)
    for value in facts.forward:
        groups[root_of(facts, value.index)].append(value)
    decisions = {}
    for root, members in groups.items():
        asked = [
            *_correctness(members),
            *_contract(members, contract, reshard_after_forward),
            *_enabled(hints.get(root, ()), enable),
        ]
        if enable:
            asked += rules.get(root, ())
            asked += [auto[root]] if root in auto else []
        asked.append(_default(members, default_saved))
        # hints are in order among themselves; the sort is stable and puts origins in theirs
        yields = root in given_up
        first, *others = sorted(
            asked, key=lambda w: Origin.DEFAULT if yields and w.prefer else w.origin
        )
        orders = any(w.origin < Origin.AUTO and not w.prefer for w in others)
        prefer = first.prefer and not orders
        # the default is no wish of anybody: it is not set aside
        against = _against(first, others)
        for value in members:
            own = () if value.index == root else (
                *_enabled(hints.get(value.index, ()), enable),
                *(rules.get(value.index, ()) if enable else ()),
            )  # fmt: skip
            overridden = tuple(dict.fromkeys((*against, *_against(first, own))))
            decisions[value.index] = Decision(
                value.index, first.action, first.origin, first.reason, overridden, prefer
            )
    return MappingProxyType(dict(sorted(decisions.items())))


def _correctness(members: list[Value]) -> list[Wish]:
    for value in members:
        for holds, reason in (
            (value.random, "draws random numbers"),
            (value.effectful, "must run exactly once"),
            (value.reads_mutated, "reads an input that is mutated"),
        ):
            if holds:
                return [Wish("save", Origin.CORRECTNESS, reason, value.source)]
    return []


def _contract(members: list[Value], contract: frozenset[int], reshard: bool) -> list[Wish]:
    if not any(value.index in contract for value in members):
        return []
    if reshard:
        return [Wish("recompute", Origin.CONTRACT, "gathers a parameter, again in backward")]
    return [Wish("save", Origin.CONTRACT, "gathers a parameter, kept: reshard_after_forward=False")]


def _enabled(wishes: tuple[Wish, ...], enable: bool) -> tuple[Wish, ...]:
    return tuple(w for w in wishes if enable or isinstance(w, CheckpointWish))


def _default(members: list[Value], default_saved: frozenset[int]) -> Wish:
    if any(value.index in default_saved for value in members):
        return Wish("save", Origin.DEFAULT, "PyTorch's min-cut keeps it")
    return Wish("recompute", Origin.DEFAULT, "PyTorch's min-cut does not keep it")


def _against(decided: Wish, wishes: list[Wish] | tuple[Wish, ...]) -> tuple[Wish, ...]:
    return tuple(w for w in wishes if w.action != decided.action and w.origin is not Origin.DEFAULT)
