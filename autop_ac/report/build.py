"""The report on a recompute plan: a frozen value built from frozen values.

Bytes are of one device. A saved storage is counted once, at the module that allocates it, so that the
rows sum to `ACReport.kept_bytes`; what is recomputed is what backward really computes again, so that a
value which nobody reads there is neither.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..config import ACConfig
from ..folding import fold_paths, unnumbered
from ..graph.devices import DeviceSpec, find_device
from ..graph.facts import Facts, Value
from ..graph.timeline import step_time
from ..recompute.hints import root_of
from ..recompute.pipeline import Recompute
from ..recompute.plan import Decision, Origin, RecomputePlan, Wish
from ..sharding.plan import ShardingPlan
from .basis import Basis
from .explain import explained, run_again
from .rows import UNREAD, ModuleRow, Reason, SetAside
from .values import ACReport

__all__ = ["ACReport", "ModuleRow", "Reason", "SetAside", "build_report", "make_report"]


def build_report(
    recompute: Recompute,
    sharding: ShardingPlan | None = None,
    *,
    device: DeviceSpec | None = None,
    names: Mapping[str, tuple[str, ...]] | None = None,
    inputs: tuple[str, ...] = (),
    config: ACConfig | None = None,
) -> ACReport:
    """Report on the outcome of the recompute part.

    Args:
        device: that times were predicted for.
        names: by a name that `checkpoint_name` gave, the captured values that have it.
        inputs: each with its global shape.
        config: the settings of AC that it came of, the defaults where None.
    """
    results = recompute.local.results
    return make_report(
        recompute.facts,
        recompute.plan,
        sharding,
        peak_bytes=recompute.profile.peak_bytes,
        peak_without_ac_bytes=recompute.profile_without_ac.peak_bytes,
        kept_bytes=recompute.profile.kept_bytes,
        kept_without_ac_bytes=recompute.profile_without_ac.kept_bytes,
        saved_without_ac=recompute.saved_without_ac,
        device=device,
        trained=frozenset(p.name for p in results if p is not None and p.kind == "gradient"),
        names=names,
        inputs=inputs,
        config=config,
    )


def make_report(
    facts: Facts,
    plan: RecomputePlan,
    sharding: ShardingPlan | None = None,
    *,
    peak_bytes: int,
    peak_without_ac_bytes: int,
    kept_bytes: int,
    kept_without_ac_bytes: int,
    saved_without_ac: Sequence[int] = (),
    device: DeviceSpec | None = None,
    trained: frozenset[str] = frozenset(),
    names: Mapping[str, tuple[str, ...]] | None = None,
    inputs: tuple[str, ...] = (),
    config: ACConfig | None = None,
) -> ACReport:
    """Report on a recompute plan from frozen values alone."""
    basis = Basis(
        facts,
        plan,
        sharding,
        device or find_device("cpu"),
        trained,
        names or {},
        config or ACConfig(),
    )
    again = run_again(basis)
    modules: dict[str, list[Value]] = {}
    for value in facts.forward:
        modules.setdefault(value.module, []).append(value)
    saved_bytes = _saved_bytes(facts, plan)
    reasons = _reasons(facts, plan, again)
    rows = [
        ModuleRow(
            module,
            1,
            saved_bytes.get(module, 0),
            sum(v.bytes for v in values if v.index in again),
            reasons.get(module, ()),
        )
        for module, values in modules.items()
    ]
    return ACReport(
        rows=_folded(rows),
        set_aside=_set_aside(facts, plan),
        notes=basis.notes,
        saved=explained(basis, plan.saved, again),
        stage_bytes=plan.stage_bytes,
        budget_bytes=plan.budget.budget_bytes if plan.budget else None,
        budget_gap=plan.budget.gap if plan.budget else None,
        kept_bytes=kept_bytes,
        kept_without_ac_bytes=kept_without_ac_bytes,
        peak_bytes=peak_bytes,
        peak_without_ac_bytes=peak_without_ac_bytes,
        time=step_time(facts, plan.saved),
        time_without_ac=step_time(facts, saved_without_ac),
        inputs=inputs,
        basis=basis,
    )


def _saved_bytes(facts: Facts, plan: RecomputePlan) -> Mapping[str, int]:
    """Bytes of saved storages by the module that allocates them; graph inputs are alive anyway."""
    kept = {s for i in plan.saved for s in facts.values[i].storages}
    maker: dict[int, Value] = {}
    for value in facts.values:
        for storage in value.storages:
            maker.setdefault(storage, value)
    sums: Counter[str] = Counter()
    for storage in kept:
        if maker[storage].side != "input":
            sums[maker[storage].module] += facts.storage_bytes[storage]
    return sums


def _reasons(
    facts: Facts, plan: RecomputePlan, again: frozenset[int]
) -> Mapping[str, tuple[Reason, ...]]:
    """By module: why, with one count for a value and all that follow it."""
    saved = frozenset(plan.saved)
    families: dict[int, list[int]] = defaultdict(list)
    for value in facts.forward:
        families[root_of(facts, value.index)].append(value.index)
    counts: dict[str, Counter[tuple[str, str, str]]] = defaultdict(Counter)
    for root, members in families.items():
        if not any(facts.values[i].bytes for i in members):
            continue  # a view of an input: kept or made again, it takes nothing
        decision = plan.decisions[members[0]]
        origin, reason = decision.origin.name.lower(), unnumbered(decision.reason)
        if not saved.isdisjoint(members):
            action = "save"
        elif not again.isdisjoint(members):
            action = "recompute"
            if decision.action == "save":
                origin, reason = "default", "a view, made again for nothing"
        else:
            action = UNREAD
            # a hint that changes nothing is named; else one line for all of these
            if decision.origin not in (Origin.HINT, Origin.RULE):
                origin, reason = "default", "backward does not read it"
        module = facts.values[members[0] if root not in plan.decisions else root].module
        counts[module][action, origin, reason] += 1
    return {
        module: tuple(Reason(*key, n) for key, n in counter.most_common())
        for module, counter in counts.items()
    }


def _folded(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    rows = list(rows)
    keys = [(r.module, (r.saved_bytes, r.recomputed_bytes, frozenset(r.reasons))) for r in rows]
    folded = []
    for path, members in fold_paths(keys):
        one, count = rows[members[0]], len(members)
        reasons = tuple(replace(r, values=r.values * count) for r in one.reasons)
        folded.append(
            ModuleRow(path, count, one.saved_bytes * count, one.recomputed_bytes * count, reasons)
        )
    return tuple(folded)


def _by_itself(decision: Decision, wish: Wish) -> bool:
    """Whether one hint or rule decided it twice: what leaves one layer and enters the next is kept."""
    entering = decision.reason.removeprefix("enters ").removesuffix(" keeps what enters")
    return entering != decision.reason and wish.reason.startswith(entering)


def _set_aside(facts: Facts, plan: RecomputePlan) -> tuple[SetAside, ...]:
    found: dict[tuple[str, tuple[str, str, str, str]], list[str]] = {}
    for value in facts.forward:
        decision = plan.decisions[value.index]
        if value.follows is not None and value.follows in plan.decisions:
            if plan.decisions[value.follows].overridden == decision.overridden:
                continue  # told of what it follows
        by = f"{decision.origin.name.lower()}: {unnumbered(decision.reason)}"
        for wish in decision.overridden:
            if wish.origin in (Origin.HINT, Origin.RULE) and not _by_itself(decision, wish):
                key = (value.module, (wish.action, wish.reason, wish.source, by))
                found.setdefault(key, []).append(value.name)
    keys = list(found)
    return tuple(
        SetAside(
            *keys[members[0]][1][:3],
            path,
            tuple(name for i in members for name in found[keys[i]]),
            keys[members[0]][1][3],
        )
        for path, members in fold_paths(keys)
    )
