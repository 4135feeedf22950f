"""The report on a recompute plan: a frozen value built from frozen values.

Bytes are of one device. A saved storage is counted once, at the module that allocates it, so that the
rows sum to `ACReport.kept_bytes`; what is recomputed is what backward really computes again, so that a
value which nobody reads there is neither.
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..graph.facts import Facts, Value
from ..graph.liveness import backward_order
from ..recompute.hints import root_of
from ..recompute.pipeline import Recompute
from ..recompute.plan import Origin, RecomputePlan
from ..sharding.plan import ShardingPlan
from .fold import fold_paths
from .text import duration, size, table_html, table_text, wrapped

UNREAD = "unread"
"""Action in a report of what is neither kept nor recomputed, because backward does not read it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why values of a module are kept or not.

    Attributes:
        action: "save", "recompute" or "unread".
        origin: who decided, ``"hint"``, ``"auto"``, ...
        reason: in plain words.
        values: how many values; views, getitems and waits count with what they belong to.
    """

    action: str
    origin: str
    reason: str
    values: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module path, or several equal layers folded into one.

    Attributes:
        module: path, with folded numbers as ``layers.0-3``; ``""`` at the root.
        layers: how many equal modules the row stands for.
        saved_bytes, recomputed_bytes: of one of them.
        reasons: of one of them, most values first.
    """

    module: str
    layers: int
    saved_bytes: int
    recomputed_bytes: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A hint or rule that a higher one overrode.

    Attributes:
        asked: "save" or "recompute".  reason, source: whose wish it was, and where it is written.
        module: where, equal layers folded.
        values: names of the values it was set aside for.
        decided_by: the origin and reason that prevailed.
    """

    asked: str
    reason: str
    source: str
    module: str
    values: tuple[str, ...]
    decided_by: str


@dataclass(frozen=True, slots=True)
class SavedValue:
    """One value that is kept from forward to backward, and why.

    Attributes:
        name, op: of the local graph's node.  module, source: the user's module path, file and line.
        shape, dtype: local.  bytes: of the storages it holds, on one device.
        origin, reason: who decided, in plain words.
    """

    name: str
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class ACReport:
    """What is kept and recomputed, why, and what it costs; all bytes are of one device.

    `str` gives it as text, ``_repr_html_`` to a notebook.

    Attributes:
        rows: by module path, in order of execution.
        set_aside: hints and rules that were overridden.
        notes: warnings and remarks.
        saved: the values kept from forward to backward, in order of execution.
        stage_bytes: the stage size used, None without stages.
        budget_bytes, budget_gap: the memory budget, and how far recompute time can be above the least
            within it, as a fraction; None without a budget.
        kept_bytes, kept_without_ac_bytes: bytes of saved activations at the end of forward.
        peak_bytes, peak_without_ac_bytes: predicted peak of live bytes.
        recompute_s: predicted seconds of recomputation in one step.
        step_s: predicted seconds of one step by the sharding search, None without a sharding plan.
    """

    rows: tuple[ModuleRow, ...]
    set_aside: tuple[SetAside, ...]
    notes: tuple[str, ...]
    saved: tuple[SavedValue, ...]
    stage_bytes: int | None
    budget_bytes: int | None
    budget_gap: float | None
    kept_bytes: int
    kept_without_ac_bytes: int
    peak_bytes: int
    peak_without_ac_bytes: int
    recompute_s: float
    step_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values that JSON can hold."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __str__(self) -> str:
        table = table_text(_HEADINGS, self._cells(), right=(1, 2, 3))
        return "\n".join((*self._summary(), table, *map(wrapped, self._remarks())))

    def _repr_html_(self) -> str:
        summary = "<br>".join(map(html.escape, self._summary()))
        remarks = "".join(f"<p>{html.escape(line)}</p>" for line in self._remarks())
        return f"<p>{summary}</p>{table_html(_HEADINGS, self._cells())}{remarks}"

    def _summary(self) -> list[str]:
        how = "no stages" if self.stage_bytes is None else f"stages of {size(self.stage_bytes)}"
        if self.budget_bytes is not None:
            how = f"a budget of {size(self.budget_bytes)}, within {self.budget_gap:.1%} of the least time"
        step = "" if self.step_s is None else f" of a step of {duration(self.step_s)}"
        return [
            f"Activation checkpointing on one device ({how})",
            f"  kept for backward {size(self.kept_bytes):>12}"
            f"   without AC {size(self.kept_without_ac_bytes):>12}",
            f"  predicted peak    {size(self.peak_bytes):>12}"
            f"   without AC {size(self.peak_without_ac_bytes):>12}",
            f"  recomputation     {duration(self.recompute_s):>12}{step}",
        ]

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.module or "(root)",
                str(row.layers),
                size(row.saved_bytes),
                size(row.recomputed_bytes),
                "\n".join(f"{r.values} {r.action}: {r.reason} ({r.origin})" for r in row.reasons),
            )
            for row in self.rows
        ]

    def _remarks(self) -> list[str]:
        asides = [
            f"set aside: {a.reason}{f' ({a.source})' if a.source else ''}, on {len(a.values)} "
            f"value{'s' if len(a.values) > 1 else ''} of {a.module or '(root)'} such as "
            f"{a.values[0]}; decided by {a.decided_by}"
            for a in self.set_aside
        ]
        return [*(f"note: {n}" for n in self.notes), *asides]


_HEADINGS = ("module", "layers", "saved", "recomputed", "why")


def build_report(recompute: Recompute, sharding: ShardingPlan | None = None) -> ACReport:
    """Report on the outcome of the recompute part."""
    return make_report(
        recompute.facts,
        recompute.plan,
        sharding,
        peak_bytes=recompute.profile.peak_bytes,
        peak_without_ac_bytes=recompute.profile_without_ac.peak_bytes,
        kept_bytes=recompute.profile.kept_bytes,
        kept_without_ac_bytes=recompute.profile_without_ac.kept_bytes,
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
) -> ACReport:
    """Report on a recompute plan from frozen values alone."""
    again = frozenset(i for i in backward_order(facts, plan.saved) if i in plan.decisions)
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
        notes=(
            *plan.notes,
            *(plan.budget.notes if plan.budget else ()),
            *(sharding.notes if sharding else ()),
        ),
        saved=tuple(_saved_value(facts, plan, i) for i in plan.saved),
        stage_bytes=plan.stage_bytes,
        budget_bytes=plan.budget.budget_bytes if plan.budget else None,
        budget_gap=plan.budget.gap if plan.budget else None,
        kept_bytes=kept_bytes,
        kept_without_ac_bytes=kept_without_ac_bytes,
        peak_bytes=peak_bytes,
        peak_without_ac_bytes=peak_without_ac_bytes,
        recompute_s=sum(facts.values[i].time_s for i in sorted(again)),
        step_s=sharding.objective_s if sharding else None,
    )


def _saved_value(facts: Facts, plan: RecomputePlan, index: int) -> SavedValue:
    value = facts.values[index]
    decision = plan.decisions.get(index)
    return SavedValue(
        value.name,
        value.captured_op or value.op,
        value.module,
        value.source,
        value.shape,
        value.dtype,
        sum(facts.storage_bytes[s] for s in value.storages),
        decision.origin.name.lower() if decision else "",
        _without_numbers(decision.reason) if decision else "",
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
        decision = plan.decisions[members[0]]
        origin, reason = decision.origin.name.lower(), _without_numbers(decision.reason)
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


def _without_numbers(reason: str) -> str:
    """Equal layers lie in different stages: without its number the reason is one for all."""
    return re.sub(r"\bstage \d+", "its stage", reason)


def _folded(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    rows = list(rows)
    keys = [(r.module, (r.saved_bytes, r.recomputed_bytes, frozenset(r.reasons))) for r in rows]
    return tuple(
        ModuleRow(
            path,
            len(members),
            rows[members[0]].saved_bytes,
            rows[members[0]].recomputed_bytes,
            rows[members[0]].reasons,
        )
        for path, members in fold_paths(keys)
    )


def _set_aside(facts: Facts, plan: RecomputePlan) -> tuple[SetAside, ...]:
    found: dict[tuple[str, tuple[str, str, str, str]], list[str]] = {}
    for value in facts.forward:
        decision = plan.decisions[value.index]
        if value.follows is not None and value.follows in plan.decisions:
            if plan.decisions[value.follows].overridden == decision.overridden:
                continue  # told of what it follows
        by = f"{decision.origin.name.lower()}: {_without_numbers(decision.reason)}"
        for wish in decision.overridden:
            if wish.origin in (Origin.HINT, Origin.RULE):
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
