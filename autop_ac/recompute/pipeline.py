"""The recompute part from end to end: facts, wishes, decisions, tags, and the partition to come."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from typing import Any, Literal

from ..config import OPTIMIZER_COPIES, ACConfig
from ..graph.ahead import bytes_ahead, bytes_late
from ..graph.collect import collect_facts
from ..graph.cost import fx_node_time_s
from ..graph.devices import DeviceSpec, Link
from ..graph.facts import Facts
from ..graph.liveness import Profile, profile
from ..sharding.apply import LocalGraph
from .budget import budget_wishes, pareto, preference_note
from .collectives import parameter_chains
from .default import default_saved, warn_of_pytorchs_budget
from .evaluate import Evaluator, Outcome
from .hints import ResolvedHints, root_of, rule_wishes, wishes_for_values
from .merge import decide
from .pareto import ParetoPoint
from .plan import Action, BudgetResult, Decision, Origin, RecomputePlan, Wish
from .stages import auto_stage_bytes, free_values, yielding_stages
from .tags import write_tags
from .verify import closure

# values up to which "auto" is compared with what PyTorch's min-cut keeps; with keeping all beyond that,
# where min-cut takes ten times as long as all the rest
_COMPARED = 4000


@dataclass(frozen=True, eq=False)
class Recompute:
    """The recompute plan of a local graph, and what was predicted with and without it.

    Attributes:
        off: decisions without AC, worked out when asked: PyTorch's min-cut takes far longer than ours.
    """

    local: LocalGraph
    facts: Facts
    plan: RecomputePlan
    profile: Profile
    off: Callable[[], Mapping[int, Decision]]

    @cached_property
    def profile_without_ac(self) -> Profile:
        """What is predicted with `enable=False`."""
        return profile(self.facts, self.saved_without_ac)

    @cached_property
    def saved_without_ac(self) -> tuple[int, ...]:
        """What is kept with `enable=False`."""
        return closure(self.facts, _actions(self.off()))[0]


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
    warn_of_pytorchs_budget()
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

    @cache
    def default() -> frozenset[int]:
        kept = default_saved(local.module, names, local.num_forward_outputs)
        return frozenset(v.index for v in facts.values if v.name in kept)

    def settled(made: _Automatic, kept: frozenset[int]) -> Mapping[int, Decision]:
        if not config.enable:
            return settle(rules={}, auto={}, enable=False, default_saved=kept)
        return settle(rules=rules, auto=made.auto, given_up=made.given_up, default_saved=kept)

    def peak_of_default() -> int:
        kept = default()
        return _profile(facts, settle(rules=rules, auto={}, default_saved=kept))[1].peak_bytes

    def decide_here() -> _Automatic:
        blind = partial(settle, default_saved=frozenset())
        made = _automatic(facts, config, device, blind, rules, peak_of_default)
        # asked only where somebody's decision is left to it
        left = any(d.origin is Origin.DEFAULT for d in settled(made, frozenset()).values())
        kept = default() if left else frozenset()
        return replace(made, default=frozenset(keys[i] for i in kept)).keyed(keys)

    # sizes of uneven shards differ from rank to rank, and so might what is decided by them
    agreed = agree(decide_here).at(keys)
    (saved, saved_inputs), predicted = _profile(facts, decisions := settled(agreed, agreed.default))
    notes = (*hints.messages, *rule_notes, *agreed.notes)
    plan = RecomputePlan(
        decisions, tuple(saved), tuple(saved_inputs), agreed.stage_bytes, notes, agreed.budget
    )
    write_tags(local.module, facts, plan)

    def off() -> Mapping[int, Decision]:
        return settle(rules={}, auto={}, enable=False, default_saved=agreed.default or default())

    return Recompute(local, facts, plan, predicted, off)


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
    peak_of_default: Callable[[], int],
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

    size = config.stage_bytes
    if size is None:
        evaluate = _evaluator(_with_room(facts), fixed, preferred)

        def peak_bytes(stage_bytes: int | None) -> int:
            if stage_bytes is not None:
                return _staged_peak(evaluate, preferred, staged(stage_bytes))
            if len(facts.values) <= _COMPARED:
                return peak_of_default()
            return evaluate(b"\1" * len(evaluate.free)).peak_bytes

        size = auto_stage_bytes(facts, peak_bytes, {i: d.action for i, d in decided.items()})
    return staged(size)


def _evaluator(
    facts: Facts, fixed: Mapping[int, Action], preferred: Mapping[int, Wish]
) -> Evaluator:
    """Of all that the automatic part may decide one way or the other."""
    forward = free_values(facts, fixed)
    decided: dict[int, Action] = {**fixed, **dict.fromkeys(forward.kept, "save")}
    return Evaluator(facts, decided, (*forward.free, *preferred))


def _staged_peak(evaluate: Evaluator, preferred: Mapping[int, Wish], made: _Automatic) -> int:
    held = {i: w for i, w in preferred.items() if i not in made.given_up}
    wishes = {**made.auto, **held}
    mask = evaluate.mask([i for i, w in wishes.items() if w.action == "save"])
    return evaluate(mask).peak_bytes


def pareto_of(facts: Facts, plan: RecomputePlan, depth: int = 4) -> tuple[ParetoPoint, ...]:
    """The curve of peak against recompute time under what binds in a plan (hints, rules, contract).

    Args:
        facts, plan: the graph and the plan; what its budget or its stages decided is free again.
        depth: how often each part of the curve is halved.
    """
    fixed = {i: d.action for i, d in plan.decisions.items() if d.origin < Origin.AUTO}
    return pareto(_with_room(facts), fixed, depth=depth)


def least_recomputed(facts: Facts, plan: RecomputePlan) -> Outcome:
    """What is predicted where all is kept that nothing binding recomputes, as under a budget with room.

    Args:
        facts, plan: as for `pareto_of`.
    """
    fixed = {i: d.action for i, d in plan.decisions.items() if d.origin < Origin.AUTO}
    evaluate = _evaluator(_with_room(facts), fixed, {})
    found = evaluate(b"\1" * len(evaluate.free))
    return replace(found, peak_bytes=profile(facts, found.saved).peak_bytes)


def _with_room(facts: Facts) -> Facts:
    """What is gathered ahead or scattered late counted as held throughout: the search knows no order but
    its own."""
    held = facts.parameter_bytes + bytes_ahead(facts) + bytes_late(facts)
    return replace(facts, parameter_bytes=held, prefetch_bytes=None)


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
