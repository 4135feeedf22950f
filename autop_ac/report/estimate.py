"""What a step will take on one device, before it runs: bytes at the peak and who holds them, seconds.

Sources are the predictions of `graph/liveness.py` and `graph/cost.py`; what those do not see (scratch
memory inside one operator, the allocator's fragmentation, the context of a CUDA process) is left to the
tenth of the device's memory that counts as not usable.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..graph.facts import Value
from ..graph.timeline import HOLDERS, StepTime, Timeline, phase_of, step_time
from .basis import Basis
from .fold import fold_paths
from .text import duration, size, table_html, table_text


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
        holdings: who holds the peak; they sum to `peak_bytes`.
        optimizer: whose state was asked for; None for the state that the settings name.
        time: seconds of computation, recomputation and communication.
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

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step."""
        return self.time.step_s

    def bytes_of(self, holder: str) -> int:
        """Bytes at the peak of one holder, such as ``"saved activations"``."""
        return sum(h.bytes for h in self.holdings if h.holder == holder)

    def to_dict(self) -> dict[str, Any]:
        """The estimate in plain values that JSON can hold."""
        return {**asdict(self), "holdings": [asdict(h) for h in self.holdings]}

    def __str__(self) -> str:
        table = table_text(_HEADINGS, self._cells(), right=(2, 3, 4))
        return "\n".join((*self._summary(), table, *self._times()))

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(html.escape, (*self._summary(), *self._times())))
        return f"<p>{lines}</p>{table_html(_HEADINGS, self._cells())}"

    def _summary(self) -> list[str]:
        of = "on one device" if self.devices == 1 else f"on each of {self.devices} devices"
        fits = "fits" if self.fits else "DOES NOT FIT"
        return [
            f"Estimate {of} ({self.device}, {size(self.device_bytes)})",
            f"  predicted peak {size(self.peak_bytes)}, usable {size(self.usable_bytes)}: {fits}",
            f"  at the peak runs {self.peak_at}; there is held:",
        ]

    def _cells(self) -> list[tuple[str, ...]]:
        cells: list[tuple[str, ...]] = []
        for h in self.holdings:
            module = (h.module or "(root)") if h.holder == "saved activations" else ""
            share = f"{h.bytes / self.peak_bytes:.1%}" if self.peak_bytes else ""
            cells.append((h.holder, module, str(h.layers) if module else "", size(h.bytes), share))
        return cells

    def _times(self) -> list[str]:
        t = self.time
        return [
            f"  predicted step {duration(t.step_s)}: computation {duration(t.compute_s)}, "
            f"recomputation {duration(t.recompute_s)},",
            f"    exposed communication {duration(t.exposed_s)} of {duration(t.communication_s)}",
        ]


_HEADINGS = ("held by", "module", "layers", "bytes", "share")


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
    usable = basis.device.memory_bytes * 9 // 10
    return Estimate(
        device=basis.device.name,
        device_bytes=basis.device.memory_bytes,
        usable_bytes=usable,
        devices=math.prod(basis.sharding.mesh_shape) if basis.sharding else 1,
        fits=peak <= usable,
        peak_bytes=peak,
        peak_at=step_in_words(basis, line, line.peak_step),
        holdings=holdings,
        optimizer=optimizer,
        time=step_time(basis.facts, basis.plan.saved),
    )


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
        if holder == "saved activations":
            saved = [(basis.facts.values[s.value], s.bytes) for s in spans if s.holder == holder]
            found += _by_module(saved)
            continue
        total = line.always.get(holder, 0) + sum(s.bytes for s in spans if s.holder == holder)
        if total:
            found.append(Holding(holder, "", 1, total))
    return tuple(found)


def _by_module(saved: Sequence[tuple[Value, int]]) -> list[Holding]:
    sums: defaultdict[str, int] = defaultdict(int)
    for value, count in saved:
        sums[value.module] += count
    rows = list(sums.items())
    return [
        Holding("saved activations", path, len(members), sum(rows[i][1] for i in members))
        for path, members in fold_paths(rows)
    ]
