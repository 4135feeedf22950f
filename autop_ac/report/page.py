"""The report as one HTML page: everything in it, nothing from the network.

Python gathers the numbers into one JSON value; ``page.js`` draws them as SVG, ``page.css`` colours them
for light and for dark.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..folding import fold_paths
from ..graph.facts import Value
from ..graph.timeline import Timeline, phase_of
from ..recompute.pareto import ParetoPoint
from ..runtime.memory import MeasuredMemory
from ..sharding.plan import ShardingPlan
from .basis import Basis
from .beside import beside
from .estimate import estimate, step_in_words
from .palette import COLOURS
from .plots import measured_steps
from .rows import in_words

if TYPE_CHECKING:
    from .values import ACReport

_POINTS = 600  # most steps drawn: more are narrower than a pixel
_DEVICES = 1024  # most devices of the mesh that are drawn


def page(
    report: ACReport, pareto: Sequence[ParetoPoint], measured: MeasuredMemory | None = None
) -> str:
    """The page as text."""
    assets = files(__package__)
    data = json.dumps(page_data(report, pareto, measured)).replace("<", "\\u003c")
    light, dark = (
        "".join(f"--{holder.replace(' ', '-')}: {both[i]};" for holder, both in COLOURS.items())
        for i in (0, 1)
    )
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    return _SHELL.format(
        title=html.escape(_title(report.basis)),
        style=style.replace("/*light*/", light).replace("/*dark*/", dark),
        data=data,
        script=assets.joinpath("page.js").read_text(encoding="utf-8"),
    )


_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main></main>
<noscript>This page draws its pictures by a script in it; nothing is fetched.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _title(basis: Basis) -> str:
    mesh = basis.sharding.mesh_shape if basis.sharding else ()
    return f"autop_ac: memory on {' x '.join(map(str, mesh)) or 'one device'}"


def page_data(
    report: ACReport, pareto: Sequence[ParetoPoint], measured: MeasuredMemory | None = None
) -> dict[str, Any]:
    """What the page shows, in plain values that JSON can hold."""
    basis = report.basis
    expected = estimate(basis)
    plain = report.to_dict()
    for row, made in zip(plain["rows"], report.rows, strict=True):
        row["why"] = in_words(made.reasons)
    return {
        "title": _title(basis),
        "estimate": expected.to_dict() | {"step_s": expected.step_s},
        "report": {k: v for k, v in plain.items() if k not in ("saved", "estimate", "timeline")},
        "enabled": basis.config.enable,
        "step_without_ac_s": report.time_without_ac.step_s,
        "memory": _memory(basis, measured),
        "beside": str(beside(basis, measured)) if measured is not None else None,
        "pareto": [{"peak": p.peak_bytes, "time": p.recompute_time_s} for p in pareto],
        "mesh": _mesh(basis.sharding, basis) if basis.sharding else None,
    }


def _memory(basis: Basis, measured: MeasuredMemory | None) -> Mapping[str, Any]:
    """Live bytes by holder; of each run of neighbouring steps the one with most bytes is shown."""
    line = basis.timeline()
    live = line.live
    count = len(live)
    shown = sorted(
        {max(range(i * count // parts, (i + 1) * count // parts), key=live.__getitem__)
         for parts in [min(count, _POINTS)] for i in range(parts)}
    )  # fmt: skip
    found: dict[str, Any] = {
        "steps": shown,
        "count": count,
        "forward_steps": line.forward_steps,
        "peak": shown.index(line.peak_step) if shown else -1,
        "holders": {h: [series[i] for i in shown] for h, series in line.by_holder().items()},
        "what": [step_in_words(basis, line, i) for i in shown],
        "phase": [phase_of(basis.facts, line, i) for i in shown],
    }
    if measured is not None and measured.live:
        found["measured"] = _measured(line, measured)
    return found


def _measured(line: Timeline, measured: MeasuredMemory) -> list[tuple[float, int]]:
    always = sum(line.always.values())
    places = measured_steps(measured, line.forward_steps, len(line.steps))
    points = list(zip(places, (always + b for b in measured.live), strict=True))
    parts = min(len(points), _POINTS)
    chunks = [
        points[i * len(points) // parts : (i + 1) * len(points) // parts] for i in range(parts)
    ]
    return [max(chunk, key=lambda point: point[1]) for chunk in chunks]


def _mesh(sharding: ShardingPlan, basis: Basis) -> Mapping[str, Any]:
    held: dict[str, Value] = {
        v.parameter: v for v in basis.facts.values if v.role in ("parameter", "buffer")
    }
    shapes = {n: held[n].shape if n in held else () for n in sharding.parameters}
    rows = [(n, (tuple(map(str, p)), shapes[n])) for n, p in sharding.parameters.items()]
    folded = []
    for path, members in fold_paths(rows):
        name, (placements, shape) = rows[members[0]]
        storages = held[name].storages if name in held else ()
        each = sum(basis.facts.storage_bytes[s] for s in storages)
        folded.append(
            {"name": path, "count": len(members), "placements": placements, "local": list(shape),
             "bytes": each * len(members)}
        )  # fmt: skip
    devices = 1
    for n in sharding.mesh_shape:
        devices *= n
    return {
        "shape": sharding.mesh_shape,
        "axes": sharding.axis_names,
        "drawn": devices <= _DEVICES,
        "parameters": folded,
        "gap": sharding.gap,
        "objective_s": sharding.objective_s,
    }
