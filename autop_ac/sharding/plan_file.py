"""A sharding plan in a file: JSON, with a version, and the fingerprint of the graph it is for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import PlanFileError
from ..near import no_file
from ..placements import parse_placements, placement_text
from .plan import Choice, Placements, ShardingPlan

_FORMAT, _VERSION = "autop_ac sharding plan", 1


class _NoPlanFileError(PlanFileError, FileNotFoundError):
    """There is no such file."""


def _text(placements: Placements | None) -> str | None:
    return None if placements is None else placement_text(placements)


def _placements(text: Any) -> Placements | None:
    return None if text is None else parse_placements(text)


def save_plan(plan: ShardingPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan; the file is complete or not there.

    Raises:
        PlanFileError: there is no such folder.
    """
    if not Path(path).parent.is_dir():
        raise _NoPlanFileError(f"{path}: there is no folder {Path(path).parent}: make it first")
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "fingerprint": plan.fingerprint,
        "mesh_shape": plan.mesh_shape,
        "axis_names": plan.axis_names,
        "objective_s": plan.objective_s,
        "hidden_s": plan.hidden_s,
        "gap": plan.gap,
        "notes": plan.notes,
        "parameters": {name: _text(placed) for name, placed in plan.parameters.items()},
        "choices": [
            [
                c.node,
                [*map(_text, c.inputs)],
                [*map(_text, c.outputs)],
                c.compute_s,
                c.redistribute_s,
            ]
            for c in plan.choices.values()
        ],
    }
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(target)


def load_plan(path: str | os.PathLike[str]) -> ShardingPlan:
    """Read a plan back.

    Raises:
        PlanFileError: not there, cut off, no plan, or of a version that this library does not read.
    """
    if not Path(path).is_file():
        raise _NoPlanFileError(
            f"{no_file(path)}\nA plan is written by plan.save(path), or by `autop-ac plan ... "
            "--save-plan FILE`"
        )
    text = Path(path).read_text(errors="replace")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{path}: no complete plan ({error}; {len(text)} characters): the file was cut off or is "
            "another's. Save the plan again"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise PlanFileError(f"{path}: no plan that ShardingPlan.save has written")
    if content.get("version") != _VERSION:
        raise PlanFileError(
            f"{path}: a plan of version {content.get('version')!r}, and this library reads {_VERSION}: "
            "make the plan again, with optimize_placement"
        )
    try:
        return _plan(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanFileError(
            f"{path}: a plan of version {_VERSION} that does not hold together ({type(error).__name__}: "
            f"{error}). Save the plan again"
        ) from error


def _plan(content: dict[str, Any]) -> ShardingPlan:
    axes = len(content["mesh_shape"])
    choices = {}
    for node, inputs, outputs, compute_s, redistribute_s in content["choices"]:
        placed = (tuple(map(_placements, inputs)), tuple(map(_placements, outputs)))
        if any(p is not None and len(p) != axes for side in placed for p in side):
            raise ValueError(f"{node} is not placed on {axes} axes")
        choices[node] = Choice(node, *placed, float(compute_s), float(redistribute_s))
    return ShardingPlan(
        mesh_shape=tuple(int(n) for n in content["mesh_shape"]),
        axis_names=tuple(map(str, content["axis_names"])),
        choices=choices,
        parameters={name: parse_placements(p) for name, p in content["parameters"].items()},
        objective_s=float(content["objective_s"]),
        gap=float(content["gap"]),
        notes=tuple(map(str, content["notes"])),
        hidden_s=float(content["hidden_s"]),
        fingerprint=str(content["fingerprint"]),
    )
