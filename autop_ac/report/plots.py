"""Figures for notebooks, by matplotlib, which only the extra ``viz`` brings."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..recompute.pareto import ParetoPoint
from ..runtime.memory import END_OF_FORWARD, MeasuredMemory
from .basis import Basis
from .estimate import step_in_words
from .palette import COLOURS
from .text import duration, size


def _figure() -> tuple[Any, Any]:
    """A figure that belongs to nobody (pyplot would keep it), and its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "figures need matplotlib: pip install 'autop-ac[viz]', or save a page with "
            'report.save("report.html"), which needs nothing'
        ) from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=120)
            return out.getvalue()

    figure = Shown(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def byte_unit(largest: int) -> tuple[int, str]:
    """The unit in which the largest of some sizes reads best, in bytes and by name."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, name
    return 1, "B"


def memory_figure(basis: Basis, measured: MeasuredMemory | None = None) -> Any:
    """Live bytes over forward and backward, the holders stacked and the peak marked."""
    figure, axes = _figure()
    line = basis.timeline()
    held = line.by_holder()
    live = line.live
    always = sum(line.always.values())
    tops = [max(live, default=0), always + (measured.peak_bytes if measured else 0)]
    unit, unit_name = byte_unit(max(tops))
    count = len(live)
    axes.stackplot(
        range(count),
        *([b / unit for b in series] for series in held.values()),
        labels=list(held),
        colors=[COLOURS[holder][0] for holder in held],
        step="post",
        linewidth=0,
    )
    axes.axvline(line.forward_steps, color="0.4", linewidth=0.8, linestyle=":")
    if count:
        at = line.peak_step
        axes.plot([at], [live[at] / unit], "o", color="black", markersize=4)
        axes.annotate(
            f"peak {size(live[at])}",
            (at, live[at] / unit),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        axes.set_title(f"at the peak runs {step_in_words(basis, line, at)}", fontsize=9)
    if measured is not None:
        places = measured_steps(measured, line.forward_steps, count)
        axes.plot(
            places,
            [(always + b) / unit for b in measured.live],
            color="black",
            linewidth=0.9,
            label=f"measured ({measured.device})",
        )
    axes.set_xlim(0, max(count - 1, 1))
    axes.set_ylim(0, 1.1 * max(tops) / unit or 1)
    axes.set_xlabel("step: forward, then backward with recomputation")
    axes.set_ylabel(f"live bytes of one device, {unit_name}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    return figure


def measured_steps(measured: MeasuredMemory, forward_steps: int, count: int) -> list[float]:
    """Where measured points lie along the predicted steps.

    Events are spread evenly over forward and over backward, which the mark "end of forward" parts where
    there is one: allocations come in the same order, not at the same times.
    """
    events = len(measured.live)
    if END_OF_FORWARD not in measured.mark_times_s:
        return [i * count / max(events - 1, 1) for i in range(events)]
    end = measured.times_s.index(measured.mark_times_s[END_OF_FORWARD])
    ahead = [i * forward_steps / max(end, 1) for i in range(end + 1)]
    rest = events - end - 1
    return ahead + [forward_steps + (i + 1) * (count - forward_steps) / rest for i in range(rest)]


def pareto_figure(points: Sequence[ParetoPoint], peak_bytes: int, recompute_s: float) -> Any:
    """Peak against recompute time, and where the plan of the report lies."""
    figure, axes = _figure()
    unit, unit_name = byte_unit(max((p.peak_bytes for p in points), default=peak_bytes))
    axes.plot(
        [p.peak_bytes / unit for p in points],
        [p.recompute_time_s * 1e3 for p in points],
        "o-",
        color=COLOURS["saved activations"][0],
        markersize=4,
        label="least recomputation found for each peak",
    )
    axes.plot(
        [peak_bytes / unit],
        [recompute_s * 1e3],
        "D",
        color=COLOURS["recomputed"][0],
        label=f"this plan: {size(peak_bytes)}, {duration(recompute_s)}",
    )
    axes.set_xlabel(f"predicted peak of one device, {unit_name}")
    axes.set_ylabel("recomputation in a step, ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure
