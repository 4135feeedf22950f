"""The rules of `ACConfig`, as wishes about local values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ..config import ACConfig
from ..graph.facts import Facts
from ..policies import Selector
from .carry import carry
from .messages import siblings, unmatched
from .plan import Action, Origin, Wish
from .scopes import matching


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
    carried = dict(carry(facts, by_origin))
    for index, wishes in direct.items():
        carried[index] = tuple(dict.fromkeys((*wishes, *carried.get(index, ()))))
    messages = []
    both = (*config.saved_selectors, *config.recomputed_selectors)
    sides: tuple[tuple[Action, tuple[Selector, ...]], ...] = (
        ("save", config.saved_selectors),
        ("recompute", config.recomputed_selectors),
    )
    for action, selectors in sides:
        messages += unmatched("ACConfig", action, selectors, ops, views, "the model")
        messages += siblings("ACConfig", action, selectors, both, ops, ops, "the model")
    return MappingProxyType(carried), tuple(messages)


def _rule_wish(config: ACConfig, op: str) -> Wish | None:
    if chosen := matching(config.saved_selectors, op):
        return Wish("save", Origin.RULE, f"ACConfig saves {chosen}")
    if chosen := matching(config.recomputed_selectors, op):
        return Wish("recompute", Origin.RULE, f"ACConfig recomputes {chosen}")
    return None
