"""What a step will take on one device, before it runs: bytes at the peak and who holds them, seconds.

Sources are the predictions of `graph/liveness.py` and `graph/cost.py`; what those do not see (scratch
memory inside one operator, the allocator's fragmentation, the context of a CUDA process) is left to the
tenth of the device's memory that counts as not usable.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..folding import fold_paths
from ..graph.facts import Value
from ..graph.timeline import HOLDERS, StepTime, Timeline, phase_of, step_time
from .basis import Basis, optimizer_bytes
from .text import duration, size, table_html, table_text, wrapped


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds bytes at the peak.

    Attributes:
        holder: one of `autop_ac.graph.timeline.HOLDERS`.
        module: of saved activations the module path that allocates them, equal layers folded as
            ``layers.0-3``; ``""`` for the root, and for all other holders.
        layers: how many equal modules the row stands for.
        bytes: of all of them together, on one device.
    """

    holder: str
    module: str
    layers: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted bytes and seconds of one training step on one device.

    `str` gives it as text, ``_repr_html_`` to a notebook.

    Attributes:
        device: name of the described device.  device_bytes: size of its memory.
        usable_bytes: nine tenths of that, what ``memory_budget="device"`` takes.
        devices: how many devices the mesh has.
        fits: whether the peak is at most `usable_bytes`.
        peak_bytes: most bytes alive at once.
        peak_at: what runs at the peak, in words.
        holdings: who holds the peak, the biggest first; they sum to `peak_bytes`.
        optimizer: whose state is counted; None where neither the call nor the settings name one.
        time: seconds of computation, recomputation and communication.
        advice: a setting that would recompute less, where the device has room; ``""`` for none.
        notes: warnings and remarks on the plan and on the placements.
    """

    device: str
    device_bytes: int
    usable_bytes: int
    devices: int
    fits: bool
    peak_bytes: int
    peak_at: str
    holdings: tuple[Holding, ...]
    optimizer: str | None
    time: StepTime
    advice: str = ""
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.time.step_s

    def bytes_of(self, holder: str) -> int:
        """Bytes at the peak of one holder, such as ``"saved activations"``."""
        return sum(h.bytes for h in self.holdings if h.holder == holder)

    def to_dict(self) -> dict[str, Any]:
        """The estimate in plain values that JSON can hold."""
        lists = {"holdings": [asdict(h) for h in self.holdings], "notes": list(self.notes)}
        return {**asdict(self), **lists}

    @property
    def verdict(self) -> str:
        """Whether it fits, and what is not counted for that."""
        fits = "fits" if self.fits else "DOES NOT FIT"
        if self.optimizer is not None:
            return f"{fits}, state of {self.optimizer} counted"
        return f'{fits}; optimizer state not counted: estimate(optimizer="adamw")'

    def __str__(self) -> str:
        table = table_text(_HEADINGS, self._cells(), right=(1, 2, 3))
        return "\n".join((*self._summary(), table, *self._times(), *self._remarks()))

    def _repr_html_(self) -> str:
        above, below = ("\n".join(lines) for lines in (self._summary(), self._times()))
        remarks = "".join(f"<p>{html.escape(' '.join(r.split()))}</p>" for r in self._remarks())
        table = table_html(_HEADINGS, self._cells())
        return f"<pre>{html.escape(above)}</pre>{table}<pre>{html.escape(below)}</pre>{remarks}"

    def _summary(self) -> list[str]:
        of = "on one device" if self.devices == 1 else f"on each of {self.devices} devices"
        return [
            f"Estimate {of} ({self.device}, {size(self.device_bytes)})",
            wrapped(
                f"  predicted peak {size(self.peak_bytes)}, usable {size(self.usable_bytes)}: {self.verdict}"
            ),
            wrapped(f"  at the peak runs {self.peak_at}; held at that moment:"),
        ]

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        small: list[Holding] = []

        def add(name: str, layers: str, count: int) -> None:
            share = f"{count / self.peak_bytes:.1%}" if self.peak_bytes else ""
            cells.append((name, layers, size(count), share))

        for holder in dict.fromkeys(h.holder for h in self.holdings):
            total = self.bytes_of(holder)
            rows = [h for h in self.holdings if h.holder == holder]
            if total * _SMALL < self.peak_bytes:
                small += rows
                continue
            add(holder, "", total)
            for h in rows if holder == _SAVED else ():
                if h.bytes * _SMALL < self.peak_bytes:
                    small.append(h)
                else:
                    add(f"  {h.module or '(root)'}", str(h.layers), h.bytes)
        if small:
            cells.append((f"{len(small)} more", "", size(sum(h.bytes for h in small)), ""))
        return cells

    def _times(self) -> list[str]:
        t = self.time
        step = (
            f"  predicted step {duration(t.step_s)}: computation {duration(t.compute_s)}, recomputed "
            f"operators {duration(t.recompute_operators_s)}, waiting for collectives "
            f"{duration(t.exposed_s)} of {duration(t.communication_s)}"
        )
        again = (
            f"  recomputation {duration(t.recompute_s)}: operators {duration(t.recompute_operators_s)}, "
            f"collectives {duration(t.recompute_communication_s)}"
        )
        return [wrapped(step), *([wrapped(again)] if t.recompute_communication_s else [])]

    def _remarks(self) -> list[str]:
        advice = [f"room: {self.advice}"] if self.advice else []
        return [wrapped(line) for line in (*advice, *(f"note: {n}" for n in self.notes))]


_SAVED = "saved activations"
_SMALL = 1000  # what is less than this part of the peak has no row of its own
_HEADINGS = ("held by", "layers", "bytes", "share")


def estimate(basis: Basis, optimizer: str | None = None) -> Estimate:
    """Predict the bytes and seconds of one step.

    Args:
        optimizer: counts the state of this one (``"adamw"``, ``"sgd"``, ...); None for the state that
            the plan counts.

    Raises:
        ConfigError: no optimizer of that name is known.
    """
    line = basis.timeline(optimizer)
    holdings = _holdings(basis, line)
    peak = sum(h.bytes for h in holdings)
    usable = basis.usable_bytes
    return Estimate(
        device=basis.device.name,
        device_bytes=basis.device.memory_bytes,
        usable_bytes=usable,
        devices=basis.devices,
        fits=peak <= usable,
        peak_bytes=peak,
        peak_at=step_in_words(basis, line, line.peak_step),
        holdings=holdings,
        optimizer=optimizer or basis.config.optimizer,
        time=step_time(basis.facts, basis.plan.saved),
        advice=_advice(basis, optimizer, peak, usable),
        notes=basis.notes,
    )


def _advice(basis: Basis, optimizer: str | None, peak_bytes: int, usable_bytes: int) -> str:
    """What the budget "device" would do where there is room; it counts the state of an optimizer."""
    config = basis.config
    now_s = basis.recompute_s
    if not config.enable or config.budget == "device" or not now_s or peak_bytes >= usable_bytes:
        return ""
    least = basis.least_recomputed
    if least.time_s > now_s * _WORTH:
        return ""  # what is recomputed binds: the contract, hints, rules
    counted = optimizer or config.optimizer or "adamw"
    held = optimizer_bytes(basis.facts, basis.trained, config.optimizer) if config.optimizer else 0
    peak = least.peak_bytes - held + optimizer_bytes(basis.facts, basis.trained, counted)
    setting = f'memory_budget="device", optimizer="{counted}"'
    if peak > usable_bytes:
        return (
            f"{size(usable_bytes - peak_bytes)} are not used: {setting} in configure_ac recomputes as "
            f"little as fits, which may be less than {duration(now_s)} a step"
        )
    return (
        f"{setting} in configure_ac would recompute {duration(least.time_s)} a step, not "
        f"{duration(now_s)}, at a peak of {size(peak)}, that state counted"
    )


_WORTH = 0.99  # of the recompute time: what would save less is not told


def step_in_words(basis: Basis, line: Timeline, step: int) -> str:
    """``"aten.mm of layers.0.attention in backward"``."""
    if step < 0:
        return "nothing"
    value = basis.facts.values[line.steps[step]]
    phase = phase_of(basis.facts, line, step)
    where = value.module or "the root"
    when = "recomputed for backward" if phase == "recompute" else f"in {phase}"
    return f"{value.op} of {where} {when}"


def _holdings(basis: Basis, line: Timeline) -> tuple[Holding, ...]:
    spans = line.at(line.peak_step)
    found = []
    for holder in HOLDERS:
        if holder == _SAVED:
            saved = [(basis.facts.values[s.value], s.bytes) for s in spans if s.holder == holder]
            found += _by_module(saved)
            continue
        total = line.always.get(holder, 0) + sum(s.bytes for s in spans if s.holder == holder)
        if total:
            found.append(Holding(holder, "", 1, total))
    sums: dict[str, int] = defaultdict(int)
    for h in found:
        sums[h.holder] += h.bytes
    return tuple(sorted(found, key=lambda h: (-sums[h.holder], h.holder, -h.bytes)))


def _by_module(saved: Sequence[tuple[Value, int]]) -> list[Holding]:
    sums: defaultdict[str, int] = defaultdict(int)
    for value, count in saved:
        sums[value.module] += count
    rows = list(sums.items())
    return [
        Holding(_SAVED, path, len(members), sum(rows[i][1] for i in members))
        for path, members in fold_paths(rows)
    ]
