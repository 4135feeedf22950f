"""The recompute part from end to end: facts, wishes, decisions, tags, and the partition to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..config import ACConfig
from ..graph.collect import collect_facts
from ..graph.cost import fx_node_time_s
from ..graph.devices import DeviceSpec, Topology
from ..graph.facts import Facts
from ..graph.liveness import Profile, profile
from ..sharding.apply import LocalGraph
from .collectives import parameter_chains
from .default import default_saved
from .hints import ResolvedHints, rule_wishes, wishes_for_values
from .merge import decide
from .plan import Action, Decision, RecomputePlan
from .stages import auto_stage_bytes, stage_wishes
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
    topology: Topology,
    mesh: DeviceMesh,
    reshard_after_forward: bool,
) -> Recompute:
    """Decide, write the tags on `local`, and predict; the plan is frozen from here on."""
    facts = collect_facts(
        local.module,
        local.placeholders,
        local.results,
        local.num_forward_outputs,
        lambda node: fx_node_time_s(node, device),
    )
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
    fixed = {i: d.action for i, d in without_auto.items() if d.origin < 5}

    def staged(stage_bytes: int | None) -> tuple[Mapping[int, Decision], tuple[str, ...]]:
        auto, stage_notes = stage_wishes(facts, stage_bytes, fixed)
        return settle(hints=hinted, rules=rules, auto=auto), stage_notes

    size = config.stage_bytes
    if size is None:
        size = auto_stage_bytes(facts, lambda b: _profile(facts, staged(b)[0])[1].peak_bytes, fixed)
    decisions, stage_notes = staged(size)
    return _finish(local, facts, decisions, off, size, (*notes, *stage_notes))


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
) -> Recompute:
    (saved, saved_inputs), predicted = _profile(facts, decisions)
    plan = RecomputePlan(decisions, tuple(saved), tuple(saved_inputs), stage_bytes, notes)
    write_tags(local.module, facts, plan)
    return Recompute(local, facts, plan, predicted, _profile(facts, off)[1])
