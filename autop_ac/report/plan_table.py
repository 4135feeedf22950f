"""A sharding plan as a table: where each parameter lies, and how good the plan is."""

from __future__ import annotations

from ..folding import fold_paths
from ..sharding.plan import ShardingPlan
from .text import duration, table_text, wrapped


def plan_table(plan: ShardingPlan) -> str:
    """Parameters with their placements, equal layers folded, then time and gap, as text.

    ``S(0)`` is a shard of dim 0, ``R`` a replica; one column for each mesh axis.
    """
    rows = [(name, tuple(map(str, placements))) for name, placements in plan.parameters.items()]
    folded = fold_paths(rows)
    headings = ("parameter", "count", *map(_axis, plan.axis_names, plan.mesh_shape))
    cells = [(path, str(len(members)), *rows[members[0]][1]) for path, members in folded]
    moving = sum(c.redistribute_s for c in plan.choices.values())
    compute = sum(c.compute_s for c in plan.choices.values())
    return "\n".join(
        (
            f"Sharding plan on mesh {' x '.join(map(_axis, plan.axis_names, plan.mesh_shape))}",
            wrapped(
                f"  step by the search, nothing recomputed: {duration(plan.objective_s)}: computation "
                f"{duration(compute)}, collectives {duration(moving)}, of which {duration(plan.hidden_s)} "
                "run beside computation"
            ),
            f"  gap to the lower bound {plan.gap:.2%}",
            table_text(headings, cells, right=(1,)),
            *(wrapped(f"note: {note}") for note in plan.notes),
        )
    )


def _axis(name: str, devices: int) -> str:
    return f"{name}={devices}"
