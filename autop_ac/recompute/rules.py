"""The rules of `ACConfig`, as wishes about local values.

Rules choose from the captured values, as hints do, and their wishes follow the values. Collectives
that sharding inserted were in no captured graph: a rule with a selector finds them by their own
operator and the module that they serve, and goes before what the moved value was asked for; one without
speaks of the user's operators, and so of what redistributions make of their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..capture.names import block_of_path
from ..config import ACConfig
from ..graph.facts import Facts
from ..policies import Rule
from .carry import carry, is_inserted, root_of
from .catalog import Captured, by_name, matched, selected
from .messages import module_unmatched, siblings, unmatched
from .plan import Action, Origin, Wish


def rule_wishes(
    facts: Facts, config: ACConfig, catalog: Sequence[Captured]
) -> tuple[Mapping[int, tuple[Wish, ...]], tuple[str, ...]]:
    """What the rules of `config` ask of local values, the first that matches first, and messages.

    Args:
        facts: the local graph.
        config: its `rules`, `save` and `recompute`.
        catalog: the captured forward values.
    """
    inserted = {v.name: v.index for v in facts.forward
                if v.collective and not v.captured_op and v.follows is None}  # fmt: skip
    places = [facts.values[i] for i in inserted.values()]
    moves = [
        Captured(v.name, v.op, v.module, block_of_path(v.module), base=v.name, source=v.source)
        for v in places
    ]
    rules = config.rules_in_order
    written = frozenset(config.rules)
    asked: dict[str, list[tuple[Rule, Wish]]] = defaultdict(list)
    covered = {rule: [v for v in catalog if rule.covers(v.module)] for rule in rules}
    covered_moves = {rule: [v for v in moves if rule.covers(v.module)] for rule in rules}
    chosen: dict[Rule, tuple[Captured, ...]] = {}
    entries = by_name(catalog)
    for rule in rules:
        chosen[rule] = _chosen(rule, covered[rule], covered_moves[rule])
        for value in _entering(rule, covered[rule], entries):
            wish = Wish("save", Origin.RULE, f'rule "{rule}" keeps what enters', prefer=rule.prefer)
            asked[value.name].append((rule, wish))
        for value in chosen[rule]:
            if value.base:
                asked[value.base].append((rule, _wish(rule, value, rule in written)))
    wishes = {base: tuple(w for _, w in said) for base, said in asked.items()}
    carried = dict(carry(facts, {n: w for n, w in wishes.items() if n not in inserted}))
    for name, index in inserted.items():
        if name in wishes:
            carried[index] = tuple(dict.fromkeys((*wishes[name], *carried.get(index, ()))))
    for rule in rules:
        if rule.action == "checkpoint":  # what moves in it is in it, but for the end of what enters
            for index in _moving(facts, frozenset(v.name for v in covered[rule])):
                wish = Wish("recompute", Origin.RULE, f'rule "{rule}"', prefer=rule.prefer)
                carried[index] = tuple(dict.fromkeys((*carried.get(index, ()), wish)))
    holders = {base: said[0][0] for base, said in asked.items()}
    left = [
        v for v in (*catalog, *moves)
        if not any(r.covers(v.module) and _speaks_of(r, v) for r in rules)
    ]  # fmt: skip
    messages: list[str] = []
    for rule in rules:
        here = [*covered[rule], *covered_moves[rule]]
        everything = (*catalog, *moves)
        messages += _told(rule, here, everything, chosen[rule], holders, left, rule in written)
    return MappingProxyType(dict(sorted(carried.items()))), tuple(messages)


def _chosen(
    rule: Rule, values: Sequence[Captured], moves: Sequence[Captured]
) -> tuple[Captured, ...]:
    if rule.selector is None:
        return tuple(v for v in values if not v.is_view)
    # apart: what sharding inserts must not shift what `every` counts
    return (*selected(rule.selector, values), *selected(rule.selector, moves))


def _entering(
    rule: Rule, values: Sequence[Captured], entries: Mapping[str, Captured]
) -> tuple[Captured, ...]:
    """Of a rule that checkpoints what its modules read and others make, each call of one by itself."""
    if rule.action != "checkpoint":
        return ()
    calls = {v.name: _call(rule, v) for v in entries.values()}
    read = {r: None for v in values for r in v.reads if calls[r] != calls[v.name]}
    return tuple(entries[name] for name in read)


def _call(rule: Rule, value: Captured) -> str | None:
    path = rule.instance(value.module)
    return None if path is None else dict(value.calls).get(path, path)


def _moving(facts: Facts, served: frozenset[str]) -> list[int]:
    """What redistributions make for these captured values; gathers of parameters have a contract."""
    return [
        v.index
        for v in facts.forward
        if is_inserted(v)
        and not v.parameter
        and v.serves in served
        and root_of(facts, v.index) == v.index
    ]


def _speaks_of(rule: Rule, value: Captured) -> bool:
    return rule.selector is None or bool(matched(rule.selector, (value,)))


def _wish(rule: Rule, value: Captured, written: bool) -> Wish:
    reason = f'rule "{rule}"' if written else f"ACConfig {rule.action}s {rule.selector}"
    if value.is_view:
        reason += ", on a view of it"
    return Wish(_action(rule), Origin.RULE, reason, prefer=rule.prefer)


def _action(rule: Rule) -> Action:
    return "save" if rule.action == "save" else "recompute"


def _told(
    rule: Rule,
    here: Sequence[Captured],
    everything: Sequence[Captured],
    chosen: Sequence[Captured],
    holders: Mapping[str, Rule],
    left: Sequence[Captured],
    written: bool,
) -> list[str]:
    if not here and everything:
        return [module_unmatched(rule, everything)]
    action = _action(rule)
    where = f'rule "{rule}"' if written else "ACConfig"
    place = "the model" if not rule.module else "its modules"
    messages = []
    if rule.selector is not None:
        said = where if written else f"ACConfig: {action}={rule.selector}"
        messages += unmatched(said, rule.selector, here, everything, place)
        left_here = [v for v in left if rule.covers(v.module)]
        messages += siblings(where, action, rule.selector, len(chosen), left_here, place)
    elif not chosen:
        messages.append(f"{where} matches no operator: what {place} compute holds no memory")
    takers = [holders[base] for base in dict.fromkeys(v.base for v in chosen if v.base)]
    against = next((taker for taker in takers if taker.action != rule.action), None)
    if against is not None and rule not in takers:
        each = "its value is" if len(takers) == 1 else f"each of its {len(takers)} values is"
        messages.append(
            f'{where} decides nothing: {each} taken by an earlier rule, such as "{against}"'
        )
    return messages
