"""Which constraints are in conflict where no plan meets all of them."""

from __future__ import annotations

from dataclasses import replace

from ..capture.joint import JointGraph
from ..errors import InfeasibleError
from .build import build_problem
from .constraints import Constraints
from .groups import Settings
from .optimise import optimise


def why_infeasible(
    joint: JointGraph, constraints: Constraints, settings: Settings, time_limit_s: float
) -> InfeasibleError:
    """Solve again without each kind of constraint in turn: those that help are in conflict."""
    no_memory = replace(constraints, parameter_low=None, parameter_high=None)
    many = 1 << 16
    relaxed = {
        "inputs": replace(constraints, inputs=(None,) * many),
        "outputs": replace(constraints, outputs=(None,) * many),
        "parameter memory": no_memory,
        "nodes": replace(constraints, nodes={}),
    }
    active = {
        "inputs": constraints.inputs is not None,
        "outputs": constraints.outputs is not None,
        "parameter memory": no_memory != constraints,
        "nodes": bool(constraints.nodes),
    }
    helpful = []
    for name, weaker in relaxed.items():
        if not active[name]:
            continue
        weaker = _fit_lengths(joint, weaker, many)
        problem = build_problem(joint, weaker, settings).problem
        if optimise(problem, time_limit_s=time_limit_s, gap=1.0) is not None:
            helpful.append(name)
    named = " and ".join(helpful) or ", ".join(n for n, on in active.items() if on) or "none given"
    budget = smallest = None
    text = f"no sharding plan meets all constraints; in conflict: {named}."
    if "parameter memory" in helpful:
        problem = build_problem(joint, no_memory, settings).problem
        total = sum(
            n.meta["val"].numel() * n.meta["val"].element_size()
            for n in joint.module.graph.nodes
            if n.op == "placeholder" and joint.placeholders[n.name].kind == "parameter"
        )
        smallest = sum(min(sizes) for _, sizes in problem.memory)
        high = constraints.parameter_high
        budget = None if high is None else int(high * total)
        text += (
            f" Parameters take {total} bytes whole and at least {smallest} per device; asked for: low="
            f"{constraints.parameter_low}, high={high}."
        )
    return InfeasibleError(
        f"{text} Drop or weaken one of them", budget_bytes=budget, smallest_bytes=smallest
    )


def _fit_lengths(joint: JointGraph, constraints: Constraints, many: int) -> Constraints:
    ins = [p.index for p in joint.placeholders.values() if p.kind == "input"]
    outs = [p.index for p in joint.results if p is not None and p.kind == "output"]
    if constraints.inputs is not None and len(constraints.inputs) == many:
        constraints = replace(constraints, inputs=(None,) * (max(ins, default=-1) + 1))
    if constraints.outputs is not None and len(constraints.outputs) == many:
        constraints = replace(constraints, outputs=(None,) * (max(outs, default=-1) + 1))
    return constraints
