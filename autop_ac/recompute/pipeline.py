"""The recompute part from end to end: facts, wishes, decisions, tags, and the partition to come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from ..config import OPTIMIZER_COPIES, ACConfig
from ..graph.collect import collect_facts
from ..graph.cost import fx_node_time_s
from ..graph.devices import DeviceSpec, Link
from ..graph.facts import Facts
from ..graph.liveness import Profile, profile
from ..sharding.apply import LocalGraph
from .budget import budget_wishes, pareto, preference_note
from .collectives import parameter_chains
from .default import default_saved
from .hints import ResolvedHints, root_of, rule_wishes, wishes_for_values
from .merge import decide
from .pareto import ParetoPoint
from .plan import Action, BudgetResult, Decision, Origin, RecomputePlan, Wish
from .stages import auto_stage_bytes, yielding_stages
from .tags import write_tags
from .verify import closure


@dataclass(frozen=True, eq=False)
class Recompute:
    """The recompute plan of a local graph, and what was predicted with and without it."""

    local: LocalGraph
    facts: Facts
    plan: RecomputePlan
    profile: Profile
    profile_without_ac: Profile


def plan_recompute(
    local: LocalGraph,
    hints: ResolvedHints,
    config: ACConfig,
    device: DeviceSpec,
    links: Mapping[str, Link],
    reshard_after_forward: bool,
    agree: Callable[[Callable[[], Any]], Any] = lambda decide: decide(),
    prefetch_bytes: int | None = None,
) -> Recompute:
    """Decide, write the tags on `local`, and predict; the plan is frozen from here on.

    Args:
        device: for predicted times and the budget "device".  links: by mesh axis, none on one device.
        agree: gives what its argument gives on the first rank.
        prefetch_bytes: bytes of parameters that may be gathered ahead of their use, None for none.
    """
    facts = collect_facts(
        local.module,
        local.placeholders,
        local.results,
        local.num_forward_outputs,
        lambda node: fx_node_time_s(node, device, links),
    )
    trained = {p.name for p in local.results if p is not None and p.kind == "gradient"}
    facts = replace(
        _with_optimizer(facts, config.optimizer, trained), prefetch_bytes=prefetch_bytes
    )
    contract = parameter_chains(facts)
    names = (
        frozenset(facts.values[i].name for i in contract) if reshard_after_forward else frozenset()
    )
    keys = _keys(facts)
    hinted = wishes_for_values(facts, hints)
    rules, rule_notes = rule_wishes(facts, config, hints.catalog) if config.enable else ({}, ())
    settle = partial(
        decide, facts, contract=contract, hints=hinted, reshard_after_forward=reshard_after_forward
    )

    def decide_here() -> _Automatic:
        kept = default_saved(local.module, names, local.num_forward_outputs)
        default = frozenset(v.index for v in facts.values if v.name in kept)
        made = _automatic(facts, config, device, partial(settle, default_saved=default), rules)
        return replace(made, default=frozenset(keys[i] for i in default)).keyed(keys)

    # sizes of uneven shards differ from rank to rank, and so might what is decided by them
    agreed = agree(decide_here).at(keys)
    settle = partial(settle, default_saved=agreed.default)
    off = settle(rules={}, auto={}, enable=False)
    decisions = off
    if config.enable:
        decisions = settle(rules=rules, auto=agreed.auto, given_up=agreed.given_up)
    notes = (*hints.messages, *rule_notes, *agreed.notes)
    return _finish(local, facts, decisions, off, agreed.stage_bytes, notes, agreed.budget)


Key = tuple[str, str, str, int]


def _keys(facts: Facts) -> tuple[Key, ...]:
    """A name of each value that is the same on every rank, whose graphs differ in pads of parameters."""
    counts: Counter[tuple[str, str, str]] = Counter()
    keys = []
    for value in facts.values:
        what = (value.origin, value.serves, value.op)
        keys.append((*what, counts[what]))
        counts[what] += 1
    return tuple(keys)


@dataclass(frozen=True)
class _Automatic:
    """What is decided by sizes, by index of value, or by key on the way to other ranks."""

    default: frozenset[Any]
    auto: Mapping[Any, Wish]
    given_up: tuple[Any, ...] = ()
    stage_bytes: int | None = None
    notes: tuple[str, ...] = ()
    budget: BudgetResult | None = None

    def keyed(self, keys: tuple[Key, ...]) -> _Automatic:
        """Indices replaced by keys, but for `default`, which has them."""
        auto = {keys[i]: wish for i, wish in self.auto.items()}
        return replace(self, auto=auto, given_up=tuple(keys[i] for i in self.given_up))

    def at(self, keys: tuple[Key, ...]) -> _Automatic:
        """Keys replaced by the indices that they have here; what is not here is left out."""
        index = {key: i for i, key in enumerate(keys)}
        return replace(
            self,
            default=frozenset(index[k] for k in self.default if k in index),
            auto={index[k]: wish for k, wish in self.auto.items() if k in index},
            given_up=tuple(index[k] for k in self.given_up if k in index),
        )


def _automatic(
    facts: Facts,
    config: ACConfig,
    device: DeviceSpec,
    settle: Callable[..., Mapping[int, Decision]],
    rules: Mapping[int, tuple[Wish, ...]],
) -> _Automatic:
    """Stages or a budget, for what nobody above has decided."""
    nothing = _Automatic(frozenset(), {})
    staging = config.stage_bytes is not None or config.stage_size == "auto"
    if not config.enable or not (staging or config.budget is not None):
        return nothing
    without_auto = settle(rules=rules, auto={})
    decided = {i: d for i, d in without_auto.items() if d.origin < Origin.AUTO}
    fixed = {i: d.action for i, d in decided.items() if not d.prefer}
    preferred = {
        i: Wish(d.action, d.origin, d.reason, prefer=True)
        for i, d in decided.items()
        if d.prefer and root_of(facts, i) == i
    }

    def told(given_up: tuple[int, ...]) -> tuple[str, ...]:
        return (preference_note(facts, preferred, given_up),) if given_up else ()

    if config.budget is not None:
        limit = _budget_bytes(facts, config.budget, settle, device)
        auto, result = budget_wishes(_with_room(facts), limit, fixed, preferred)
        return replace(
            nothing,
            auto=auto,
            given_up=tuple(result.given_up),
            notes=told(result.given_up),
            budget=result,
        )

    def staged(stage_bytes: int | None) -> _Automatic:
        auto, given_up, notes = yielding_stages(facts, stage_bytes, fixed, preferred)
        return replace(
            nothing,
            auto=auto,
            given_up=tuple(given_up),
            stage_bytes=stage_bytes,
            notes=(*notes, *told(given_up)),
        )

    def peak_bytes(stage_bytes: int | None) -> int:
        made = staged(stage_bytes)
        decisions = settle(rules=rules, auto=made.auto, given_up=made.given_up)
        return _profile(facts, decisions)[1].peak_bytes

    size = config.stage_bytes
    if size is None:
        size = auto_stage_bytes(facts, peak_bytes, {i: d.action for i, d in decided.items()})
    return staged(size)


def pareto_of(facts: Facts, plan: RecomputePlan, depth: int = 4) -> tuple[ParetoPoint, ...]:
    """The curve of peak against recompute time under what binds in a plan (hints, rules, contract).

    Args:
        facts, plan: the graph and the plan; what its budget or its stages decided is free again.
        depth: how often each part of the curve is halved.
    """
    fixed = {i: d.action for i, d in plan.decisions.items() if d.origin < Origin.AUTO}
    return pareto(_with_room(facts), fixed, depth=depth)


def _with_room(facts: Facts) -> Facts:
    """What is gathered ahead counted as held throughout: the search knows no order but its own."""
    ahead = facts.prefetch_bytes or 0
    return replace(facts, parameter_bytes=facts.parameter_bytes + ahead, prefetch_bytes=None)


def _with_optimizer(facts: Facts, optimizer: str | None, trained: Collection[str]) -> Facts:
    """Optimizer state of what gets a gradient counts as parameters do: it is alive throughout."""
    copies = OPTIMIZER_COPIES[optimizer] if optimizer else 0
    parameters = [v for v in facts.values if v.role == "parameter" and v.parameter in trained]
    held = {s for v in parameters for s in v.storages}
    state = copies * sum(facts.storage_bytes[s] for s in held)
    return replace(facts, parameter_bytes=facts.parameter_bytes + state)


def _budget_bytes(
    facts: Facts,
    budget: int | Fraction | Literal["device"],
    settle: Callable[..., Mapping[int, Decision]],
    device: DeviceSpec,
) -> int:
    """The budget in bytes; a fraction is of the peak with nothing recomputed beyond the contract."""
    if budget == "device":
        return device.memory_bytes * 9 // 10
    if isinstance(budget, Fraction):
        keep = Wish("save", Origin.AUTO, "the peak without AC")
        all_kept = settle(hints={}, rules={}, auto={v.index: keep for v in facts.forward})
        return math.floor(budget * _profile(facts, all_kept)[1].peak_bytes)
    return budget


def _actions(decisions: Mapping[int, Decision]) -> dict[int, Action]:
    return {i: d.action for i, d in decisions.items()}


def _profile(facts: Facts, decisions: Mapping[int, Decision]) -> tuple[Any, Profile]:
    saved = closure(facts, _actions(decisions))
    return saved, profile(facts, saved[0])


def _finish(
    local: LocalGraph,
    facts: Facts,
    decisions: Mapping[int, Decision],
    off: Mapping[int, Decision],
    stage_bytes: int | None,
    notes: tuple[str, ...],
    budget: BudgetResult | None = None,
) -> Recompute:
    (saved, saved_inputs), predicted = _profile(facts, decisions)
    plan = RecomputePlan(decisions, tuple(saved), tuple(saved_inputs), stage_bytes, notes, budget)
    write_tags(local.module, facts, plan)
    return Recompute(local, facts, plan, predicted, _profile(facts, off)[1])
