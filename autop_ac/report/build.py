"""The report on a recompute plan: a frozen value built from frozen values."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..graph.facts import Value
from ..graph.liveness import backward_order
from ..recompute.pipeline import Recompute
from ..sharding.plan import ShardingPlan


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module path, or several equal layers folded into one.

    Attributes:
        module: path, with folded numbers as ``layers.0-3``.
        layers: how many equal layers the row stands for; bytes are of one of them.
        saved_bytes, recomputed_bytes: of one layer, on one device.
        reasons: ``(action, origin, reason, values)`` of one layer, most values first.
    """

    module: str
    layers: int
    saved_bytes: int
    recomputed_bytes: int
    reasons: tuple[tuple[str, str, str, int], ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A hint that a higher one overrode."""

    value: str
    module: str
    asked: str
    reason: str
    source: str
    decided_by: str


@dataclass(frozen=True, slots=True)
class ACReport:
    """What is kept and recomputed, why, and what it costs; all bytes are of one device.

    Attributes:
        rows: by module path.
        set_aside: hints that were overridden, with who decided.
        notes: warnings and remarks.
        saved: names of the values kept from forward to backward.
        stage_bytes: the stage size used, None without stages.
        kept_bytes, kept_without_ac_bytes: bytes of saved activations at the end of forward.
        peak_bytes, peak_without_ac_bytes: predicted peak of live bytes.
        recompute_s: predicted seconds of recomputation in one step.
        plan_s: predicted seconds of one step, by the sharding search.
    """

    rows: tuple[ModuleRow, ...]
    set_aside: tuple[SetAside, ...]
    notes: tuple[str, ...]
    saved: tuple[str, ...]
    stage_bytes: int | None
    kept_bytes: int
    kept_without_ac_bytes: int
    peak_bytes: int
    peak_without_ac_bytes: int
    recompute_s: float
    plan_s: float

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values that JSON can hold."""
        return asdict(self)

    def __str__(self) -> str:
        console = Console(width=100, no_color=True, force_terminal=False)
        with console.capture() as text:
            for line in self._summary():
                console.print(line, highlight=False, markup=False)
            console.print(self._table())
            for line in self._remarks():
                console.print(line, highlight=False, markup=False)
        return text.get()

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(r.module or '(root)')}</td><td>{r.layers}</td>"
            f"<td>{size(r.saved_bytes)}</td><td>{size(r.recomputed_bytes)}</td>"
            f"<td>{'<br>'.join(html.escape(x) for x in _reasons(r))}</td></tr>"
            for r in self.rows
        )
        head = "".join(f"<th>{h}</th>" for h in _HEADINGS)
        lines = "".join(f"<p>{html.escape(x)}</p>" for x in (*self._summary(), *self._remarks()))
        return f"{lines}<table><tr>{head}</tr>{cells}</table>"

    def _summary(self) -> list[str]:
        stages = "no stages" if self.stage_bytes is None else f"stages of {size(self.stage_bytes)}"
        return [
            f"Activation checkpointing on one device ({stages})",
            f"  kept for backward  {size(self.kept_bytes)}  "
            f"(without AC {size(self.kept_without_ac_bytes)})",
            f"  predicted peak     {size(self.peak_bytes)}  "
            f"(without AC {size(self.peak_without_ac_bytes)})",
            f"  recompute          {self.recompute_s * 1e3:.3f} ms of a step",
        ]

    def _table(self) -> Table:
        table = Table(*_HEADINGS)
        for row in self.rows:
            table.add_row(
                row.module or "(root)", str(row.layers), size(row.saved_bytes),
                size(row.recomputed_bytes), "\n".join(_reasons(row)),
            )  # fmt: skip
        return table

    def _remarks(self) -> list[str]:
        asides = [
            f"set aside: {s.reason} ({s.source or 'no source line'}) on {s.value} in "
            f"{s.module or '(root)'}; decided by {s.decided_by}"
            for s in self.set_aside
        ]
        return [*(f"note: {n}" for n in self.notes), *asides]


_HEADINGS = ("module", "layers", "saved", "recomputed", "why")


def size(count: int) -> str:
    """Bytes for people: ``"1.50 MiB"``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def _reasons(row: ModuleRow) -> list[str]:
    return [f"{n} {action}: {reason}" for action, _, reason, n in row.reasons]


def build_report(recompute: Recompute, plan: ShardingPlan) -> ACReport:
    """Report on a recompute plan from the values it was made of."""
    facts, decisions = recompute.facts, recompute.plan.decisions
    saved = frozenset(recompute.plan.saved)
    by_module: dict[str, list[Value]] = {}
    for value in facts.forward:
        by_module.setdefault(value.module, []).append(value)
    recomputed = frozenset(backward_order(facts, recompute.plan.saved))
    rows = [_row(name, values, recompute, saved, recomputed) for name, values in by_module.items()]
    asides = tuple(
        SetAside(
            v.name, v.module, wish.action, wish.reason, wish.source,
            f"{decisions[v.index].origin.name.lower()}: {decisions[v.index].reason}",
        )
        for v in facts.forward
        if v.follows is None
        for wish in decisions[v.index].overridden
        if wish.origin in (3, 4) and wish.action != decisions[v.index].action
    )  # fmt: skip
    again = [v for v in map(facts.values.__getitem__, recomputed) if v.side == "forward"]
    return ACReport(
        rows=_folded(rows),
        set_aside=asides,
        notes=recompute.plan.notes,
        saved=tuple(facts.values[i].name for i in recompute.plan.saved),
        stage_bytes=recompute.plan.stage_bytes,
        kept_bytes=recompute.profile.kept_bytes,
        kept_without_ac_bytes=recompute.profile_without_ac.kept_bytes,
        peak_bytes=recompute.profile.peak_bytes,
        peak_without_ac_bytes=recompute.profile_without_ac.peak_bytes,
        recompute_s=sum(v.time_s for v in again),
        plan_s=plan.objective_s,
    )


def _row(
    name: str,
    values: Sequence[Value],
    recompute: Recompute,
    saved: frozenset[int],
    recomputed: frozenset[int],
) -> ModuleRow:
    facts, decisions = recompute.facts, recompute.plan.decisions
    storages = {s for v in values if v.index in saved for s in v.storages}
    again = [v for v in values if v.index in recomputed]
    counts = Counter(
        (d.action, d.origin.name.lower(), d.reason)
        for d in (decisions[v.index] for v in values if v.follows is None)
    )
    return ModuleRow(
        name,
        1,
        sum(facts.storage_bytes[s] for s in storages),
        sum(v.bytes for v in again),
        tuple((*key, n) for key, n in counts.most_common()),
    )


def _folded(rows: Sequence[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Rows that differ in one number of their path only become one."""
    groups: dict[object, list[ModuleRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.module, count=1)
        key = (pattern, row.saved_bytes, row.recomputed_bytes, row.reasons)
        groups.setdefault(key, []).append(row)
    folded = []
    for group in groups.values():
        first = group[0]
        name = first.module
        if len(group) > 1:
            numbers = [_number(r.module) for r in group]
            name = re.sub(r"(?<=\.)\d+(?=\.|$)", _ranges(numbers), name, count=1)
        folded.append(
            ModuleRow(name, len(group), first.saved_bytes, first.recomputed_bytes, first.reasons)
        )
    return tuple(folded)


def _number(module: str) -> int:
    found = re.search(r"(?<=\.)\d+(?=\.|$)", module)
    assert found is not None
    return int(found.group())


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
