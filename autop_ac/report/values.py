"""The report on a recompute plan, as a value: in text, HTML, JSON, pictures and answers to questions.

Bytes are of one device. `build` makes it, and says how they are counted.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..graph.timeline import StepTime, Timeline
from ..recompute.pareto import ParetoPoint
from ..recompute.pipeline import pareto_of
from ..runtime.memory import MeasuredMemory
from .basis import Basis
from .beside import Comparison, beside
from .curve import ParetoCurve
from .estimate import Estimate, estimate
from .explain import Explained, Explanation, explain
from .page import page
from .plots import memory_figure, pareto_figure
from .rows import HEADINGS, ModuleRow, SetAside, in_words, listing
from .text import duration, size, table_html, wrapped


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
        time, time_without_ac: predicted seconds of one step, and where they go.
        inputs: the inputs that all this is for, each with its shape over all devices; with ``dynamic=True``
            other sizes have graphs of their own. ``()`` under `torch.compile`.
    """

    rows: tuple[ModuleRow, ...]
    set_aside: tuple[SetAside, ...]
    notes: tuple[str, ...]
    saved: tuple[Explained, ...]
    stage_bytes: int | None
    budget_bytes: int | None
    budget_gap: float | None
    kept_bytes: int
    kept_without_ac_bytes: int
    peak_bytes: int
    peak_without_ac_bytes: int
    time: StepTime
    time_without_ac: StepTime
    inputs: tuple[str, ...]
    basis: Basis = field(repr=False, compare=False)
    """The frozen values that all this was made from."""

    @property
    def recompute_s(self) -> float:
        """Predicted seconds of all that backward runs again in one step, collectives included."""
        return self.time.recompute_s

    @property
    def step_s(self) -> float:
        """Predicted seconds of one step, recomputation included."""
        return self.time.step_s

    def estimate(self, optimizer: str | None = None) -> Estimate:
        """Who holds the predicted peak, where the seconds of a step go, and whether it fits.

        Args:
            optimizer: counts the state of this one, ``"adamw"`` and others as in `ACConfig`; None for
                the state that the settings name.

        Raises:
            ConfigError: no optimizer of that name is known.
        """
        return estimate(self.basis, optimizer)

    def explain(self, asked: str) -> Explanation:
        """What is saved and recomputed of a module, a tensor or a parameter, why, and what it costs.

        Args:
            asked: a module path or a glob of some (``"layers.3.attention"``, ``"layers.*.mlp"``), a
                tensor's name in the graph or by `checkpoint_name`, or a parameter's name.

        Raises:
            UsageError: nothing is called so; the nearest names are told.
        """
        return explain(self.basis, asked)

    def timeline(self, optimizer: str | None = None) -> Timeline:
        """Who holds memory at every step of forward and backward."""
        return self.basis.timeline(optimizer)

    def pareto(self, depth: int = 4) -> ParetoCurve:
        """The curve of predicted peak against recompute time; see `AutoParallel.pareto`."""
        points = pareto_of(self.basis.facts, self.basis.plan, depth)
        return ParetoCurve(points, (self.peak_bytes, self.recompute_s), self.basis.usable_bytes)

    def beside(self, measured: MeasuredMemory) -> Comparison:
        """What was predicted next to what `measure_memory` measured around a training step."""
        return beside(self.basis, measured)

    def plot_memory(self, measured: MeasuredMemory | None = None) -> Any:
        """Live bytes over forward and backward as a matplotlib figure (extra ``viz``).

        Args:
            measured: draws this next to the prediction.
        """
        return memory_figure(self.basis, measured)

    def plot_pareto(self, points: Sequence[ParetoPoint] | None = None) -> Any:
        """The curve of peak against recompute time as a matplotlib figure (extra ``viz``).

        Args:
            points: of `pareto`; None works them out, which takes a while on a large graph.
        """
        points = self.pareto() if points is None else points
        return pareto_figure(points, self.peak_bytes, self.recompute_s)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values that JSON can hold, the estimate and the live bytes included."""
        plain: dict[str, Any] = {
            f.name: _plain(_as_plain(getattr(self, f.name)))
            for f in fields(self)
            if f.name != "basis"
        }
        line = self.timeline()
        live = {"forward_steps": line.forward_steps, "live_bytes": list(line.live)}
        seconds = {"recompute_s": self.recompute_s, "step_s": self.step_s}
        return {**plain, **seconds, "estimate": self.estimate().to_dict(), "timeline": live}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(
        self,
        path: str | Path,
        *,
        measured: MeasuredMemory | None = None,
        pareto: Sequence[ParetoPoint] | None = None,
    ) -> Path:
        """Write the report: ``.html`` is one page with pictures, without network; ``.json``, ``.txt``.

        Args:
            path: where; its ending chooses the form.
            measured: of the page, drawn next to the prediction.
            pareto: of the page, points of `pareto`; None works out a coarse curve, ``()`` leaves it out.

        Returns:
            The path.

        Raises:
            ConfigError: another ending.
        """
        path = Path(path)
        if path.suffix in (".html", ".htm"):
            points = self.pareto(depth=1) if pareto is None else pareto
            text = page(self, points, measured)
        elif path.suffix == ".json":
            text = self.to_json()
        elif path.suffix == ".txt":
            text = f"{self}\n\n{replace(self.estimate(), notes=())}\n"  # told above
        else:
            raise ConfigError(
                f"save({str(path)!r}): the ending says the form; give .html, .json or .txt"
            )
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        table = listing(self._shown())
        return "\n".join((*self._summary(), "", *table, *self._hidden(), *self._remarks()))

    def _repr_html_(self) -> str:
        cells = [
            (row.module or "(root)", str(row.layers), size(row.saved_bytes), size(row.recomputed_bytes),
             "\n".join(in_words(row.reasons)))
            for row in self._shown()
        ]  # fmt: skip
        summary = html.escape("\n".join(self._summary()))
        table = table_html((*HEADINGS, "why"), cells)
        below = (*self._hidden(), *self._remarks())
        remarks = "".join(f"<p>{html.escape(' '.join(line.split()))}</p>" for line in below)
        return f"<pre>{summary}</pre>{table}{remarks}"

    def _shown(self) -> list[ModuleRow]:
        """Rows that hold something, the biggest first."""
        rows = [r for r in self.rows if r.saved_bytes or r.recomputed_bytes]
        return sorted(rows, key=lambda r: -(r.saved_bytes + r.recomputed_bytes))

    def _hidden(self) -> list[str]:
        count = sum(r.layers for r in self.rows if not (r.saved_bytes or r.recomputed_bytes))
        modules = f"module{'s' if count > 1 else ''}"
        return [f"{count} {modules} more: nothing saved, nothing recomputed"] if count else []

    def _summary(self) -> list[str]:
        how = "no stages" if self.stage_bytes is None else f"stages of {size(self.stage_bytes)}"
        if self.budget_bytes is not None:
            how = f"a budget of {size(self.budget_bytes)}, within {self.budget_gap:.1%} of the least time"
        if not self.basis.config.enable:
            how = "off"
        state = "" if self.basis.config.optimizer else ", without optimizer state"
        lines = (
            ("", "this plan", "without AC"),
            ("saved for backward", size(self.kept_bytes), size(self.kept_without_ac_bytes)),
            (f"predicted peak{state}", size(self.peak_bytes), size(self.peak_without_ac_bytes)),
            ("predicted step", duration(self.step_s), duration(self.time_without_ac.step_s)),
            ("  recomputation in it", duration(self.recompute_s),
             duration(self.time_without_ac.recompute_s)),
        )  # fmt: skip
        sizes = f", inputs {', '.join(self.inputs)}" if self.inputs else ""
        head = f"Activation checkpointing {self.basis.where} ({how}){sizes}"
        return [head, *(f"  {what:40}{here:>12}{off:>14}" for what, here, off in lines)]

    def _remarks(self) -> list[str]:
        asides = [
            f"set aside: {a.reason}{f' ({a.source})' if a.source else ''}, on {len(a.values)} "
            f"value{'s' if len(a.values) > 1 else ''} of {a.module or '(root)'} such as "
            f"{a.values[0]}; decided by {a.decided_by}"
            for a in self.set_aside
        ]
        return [wrapped(line) for line in (*(f"note: {n}" for n in self.notes), *asides)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_plain(v) for v in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
