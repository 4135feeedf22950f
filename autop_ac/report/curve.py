"""The curve of peak against recompute time, as a sequence of points that prints as a table."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Self

from ..recompute.pareto import ParetoPoint
from .text import duration, size, table_html, table_text, wrapped


class ParetoCurve(tuple[ParetoPoint, ...]):
    """Points of growing peak and falling recompute time; a tuple of them.

    `str` gives it as a table, ``_repr_html_`` to a notebook: of each point the setting that reaches it.
    """

    here: tuple[int, float]
    usable_bytes: int

    def __new__(
        cls,
        points: Iterable[ParetoPoint] = (),
        here: tuple[int, float] = (0, 0.0),
        usable_bytes: int = 0,
    ) -> Self:
        """The points, with what the table says of them.

        Args:
            points: ascending in peak.
            here: peak and recompute time of the plan that they are compared with.
            usable_bytes: what the budget "device" is.
        """
        made = super().__new__(cls, points)
        made.here, made.usable_bytes = here, usable_bytes
        return made

    def __str__(self) -> str:
        table = table_text(_HEADINGS, self._cells(), right=(1, 2))
        return "\n".join((self._title(), table, wrapped(self._below())))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = table_html(_HEADINGS, self._cells())
        return f"<p>{html.escape(self._title())}</p>{table}<p>{html.escape(self._below())}</p>"

    def _title(self) -> str:
        points = f"{len(self)} point{'s' if len(self) != 1 else ''}"
        return f"Least recomputation found for each peak of one device, {points}"

    def _cells(self) -> list[tuple[str, ...]]:
        fitting = [i for i, p in enumerate(self) if p.peak_bytes <= self.usable_bytes]
        cells: list[tuple[str, ...]] = []
        for i, point in enumerate(self):
            device = ', or "device"' if fitting and i == fitting[-1] else ""
            setting = f"memory_budget={point.peak_bytes}{device}"
            cells.append((setting, size(point.peak_bytes), duration(point.recompute_time_s)))
        return cells

    def _below(self) -> str:
        peak, seconds = self.here
        return (
            f"this plan: peak {size(peak)}, recomputation {duration(seconds)}. Hints and rules hold in every "
            "point: give the setting to configure_ac in place of stage_size, with the others as they are"
        )


_HEADINGS = ("setting", "predicted peak", "recomputation")
