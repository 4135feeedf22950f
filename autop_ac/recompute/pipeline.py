"""The recompute part from end to end: facts, wishes, decisions, tags, and the partition to come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
) -> Recompute:
    """Decide, write the tags on `local`, and predict; the plan is frozen from here on.

    Args:
        device: for predicted times and the budget "device".  links: by mesh axis, none on one device.
    """
    facts = collect_facts(
        local.module,
        local.placeholders,
        local.results,
        local.num_forward_outputs,
        lambda node: fx_node_time_s(node, device, links),
    )
    facts = _with_optimizer(facts, config.optimizer)
    contract = parameter_chains(facts)
    names = (
        frozenset(facts.values[i].name for i in contract) if reshard_after_forward else frozenset()
    )
    kept = default_saved(local.module, names, local.num_forward_outputs)
    default = frozenset(v.index for v in facts.values if v.name in kept)
    settle = partial(
        decide,
        facts,
        contract=contract,
        default_saved=default,
        reshard_after_forward=reshard_after_forward,
    )
    hinted = wishes_for_values(facts, hints)
    off = settle(hints=hinted, rules={}, auto={}, enable=False)
    if not config.enable:
        return _finish(local, facts, off, off, None, hints.messages)
    rules, rule_notes = rule_wishes(facts, config, hints.catalog)
    without_auto = settle(hints=hinted, rules=rules, auto={})
    notes = (*hints.messages, *rule_notes)
    if config.stage_bytes is None and config.stage_size != "auto":
        return _finish(local, facts, without_auto, off, None, notes)
    decided = {i: d for i, d in without_auto.items() if d.origin < Origin.AUTO}
    fixed = {i: d.action for i, d in decided.items() if not d.prefer}
    preferred = {
        i: Wish(d.action, d.origin, d.reason, prefer=True)
        for i, d in decided.items()
        if d.prefer and root_of(facts, i) == i
    }
    if config.budget is not None:
        limit = _budget_bytes(facts, config.budget, settle, device)
        auto, result = budget_wishes(facts, limit, fixed, preferred)
        decisions = settle(hints=hinted, rules=rules, auto=auto, given_up=result.given_up)
        if result.given_up:
            notes = (*notes, preference_note(facts, preferred, result.given_up))
        return _finish(local, facts, decisions, off, None, notes, result)

    def staged(stage_bytes: int | None) -> tuple[Mapping[int, Decision], tuple[str, ...]]:
        auto, given_up, stage_notes = yielding_stages(facts, stage_bytes, fixed, preferred)
        if given_up:
            stage_notes = (*stage_notes, preference_note(facts, preferred, given_up))
        decisions = settle(hints=hinted, rules=rules, auto=auto, given_up=given_up)
        return decisions, stage_notes

    size = config.stage_bytes
    if size is None:
        bound = {i: d.action for i, d in decided.items()}
        size = auto_stage_bytes(facts, lambda b: _profile(facts, staged(b)[0])[1].peak_bytes, bound)
    decisions, stage_notes = staged(size)
    return _finish(local, facts, decisions, off, size, (*notes, *stage_notes))


def pareto_of(recompute: Recompute, depth: int = 3) -> tuple[ParetoPoint, ...]:
    """The curve of peak against recompute time under what binds in a plan (hints, rules, contract).

    Args:
        recompute: the plan; what its budget or its stages decided is free again.
        depth: how often each part of the curve is halved.
    """
    fixed = {i: d.action for i, d in recompute.plan.decisions.items() if d.origin < Origin.AUTO}
    return pareto(recompute.facts, fixed, depth=depth)


def _with_optimizer(facts: Facts, optimizer: str | None) -> Facts:
    """Optimizer state counts as parameters do: it is alive throughout."""
    copies = OPTIMIZER_COPIES[optimizer] if optimizer else 0
    held = {s for v in facts.values if v.role == "parameter" for s in v.storages}
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
