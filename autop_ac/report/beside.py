"""Prediction next to measurement: the same bytes, counted from the start of a training step.

`measure_memory` counts what its block allocates. So here the prediction goes without what is there before
a step: parameters, optimizer state, and the inputs, which are to be made before the block.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from ..runtime.memory import END_OF_FORWARD, MeasuredMemory
from .basis import Basis
from .text import size, table_html, table_text


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bytes on one device beyond those before the step, predicted and measured.

    `str` gives it as text, ``_repr_html_`` to a notebook.

    Attributes:
        device: whose bytes were measured.
        peak_bytes, measured_peak_bytes: most bytes alive at once.
        kept_bytes: what forward leaves: saved activations and outputs.
        measured_kept_bytes: bytes at ``mark("end of forward")``; None where there is no such mark.
    """

    device: str
    peak_bytes: int
    measured_peak_bytes: int
    kept_bytes: int
    measured_kept_bytes: int | None

    @property
    def ratio(self) -> float:
        """Measured peak over predicted peak."""
        return self.measured_peak_bytes / self.peak_bytes if self.peak_bytes else float("inf")

    def __str__(self) -> str:
        return f"{_TITLE} ({self.device})\n{table_text(_HEADINGS, self._cells(), right=(1, 2, 3))}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(f'{_TITLE} ({self.device})')}</p>{table_html(_HEADINGS, self._cells())}"

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [("peak", self.peak_bytes, self.measured_peak_bytes)]
        if self.measured_kept_bytes is not None:
            rows.append((END_OF_FORWARD, self.kept_bytes, self.measured_kept_bytes))
        return [
            (what, size(said), size(seen), f"{seen / said:.3f}" if said else "")
            for what, said, seen in rows
        ]


_TITLE = "Bytes of one step beyond parameters, optimizer state and inputs"
_HEADINGS = ("", "predicted", "measured", "measured / predicted")


def beside(basis: Basis, measured: MeasuredMemory) -> Comparison:
    """Set a measured training step beside the prediction.

    Args:
        measured: a block that has ended, with forward and backward in it and the inputs made before.
    """
    line = basis.timeline()
    facts = basis.facts
    always = {
        s for v in facts.values if v.side == "input" and v.role != "tangent" for s in v.storages
    }
    left = {
        s for i in (*basis.plan.saved, *facts.forward_outputs) for s in facts.values[i].storages
    }
    return Comparison(
        measured.device,
        max(line.live) - sum(line.always.values()) if line.steps else 0,
        measured.peak_bytes,
        sum(facts.storage_bytes[s] for s in left - always),
        measured.marks.get(END_OF_FORWARD),
    )
