"""Which constraints are in conflict where no plan meets all of them, and what would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.tensor.placement_types import Placement

from ..capture.joint import JointGraph
from ..capture.marks import placed_of
from ..errors import InfeasibleError
from ..placements import placement_text
from .build import Built, build_problem
from .constraints import Constraints
from .groups import Settings
from .limits import PARAMETERS, STATE
from .optimise import optimise
from .option import given

_MANY_NODES = 16  # constraints on single nodes that are tried one by one


def why_infeasible(
    joint: JointGraph, constraints: Constraints, settings: Settings, time_limit_s: float
) -> InfeasibleError:
    """Solve again without each constraint in turn: those that help are in conflict.

    Of each the nearest that would do is told: what the plan has there without it.
    """
    helpful: list[str] = []
    would_do: list[str] = []
    for name, weaker in _weaker(joint, constraints).items():
        built = build_problem(joint, weaker, settings)
        found = optimise(built.problem, time_limit_s=time_limit_s, gap=1.0)
        if found is not None:
            helpful.append(name)
            would_do.append(_instead(joint, name, built, found[0], constraints))
    if not helpful:
        helpful = list(_weaker(joint, constraints)) or ["none given"]
    text = f"no sharding plan meets all constraints; in conflict: {' and '.join(helpful)}."
    if lines := _constraints_in_model(joint):
        text += f" with_sharding_constraint stands at {', '.join(lines)}."
    if would_do:
        text += f" What would do: {'; or '.join(would_do)}."
    budget, smallest = None, None
    limits = {
        limit.name: limit for limit in build_problem(joint, constraints, settings).problem.limits
    }
    for name in (PARAMETERS, STATE):
        if name in helpful:
            limit = limits[name]
            smallest = int(sum(min(sizes) for _, sizes in limit.sizes))
            whole = int(sum(max(sizes) for _, sizes in limit.sizes))
            budget = None if limit.high is None else int(limit.high)
            low = "" if limit.low is None else f"at least {int(limit.low)} and "
            text += (
                f" {name.capitalize()}: {whole} bytes whole and at least {smallest} per device; asked "
                f"for: {low}at most {budget}."
            )
    return InfeasibleError(
        f"{text} Drop or weaken one of them", budget_bytes=budget, smallest_bytes=smallest
    )


def _weaker(joint: JointGraph, constraints: Constraints) -> dict[str, Constraints]:
    """The constraints without each of them in turn, by what was taken out."""
    ins = [p.index for p in joint.placeholders.values() if p.kind == "input"]
    outs = [p.index for p in joint.results if p is not None and p.kind == "output"]
    found: dict[str, Constraints] = {}
    if constraints.inputs is not None:
        free: tuple[None, ...] = (None,) * (max(ins, default=-1) + 1)
        found["inputs"] = replace(constraints, inputs=free)
    if constraints.outputs is not None:
        free = (None,) * (max(outs, default=-1) + 1)
        found["outputs"] = replace(constraints, outputs=free)
    if constraints.parameter_low is not None or constraints.parameter_high is not None:
        found[PARAMETERS] = replace(constraints, parameter_low=None, parameter_high=None)
    if constraints.state_bytes is not None:
        found[STATE] = replace(constraints, state_bytes=None)
    nodes = constraints.nodes
    if len(nodes) > _MANY_NODES:
        found["nodes"] = replace(constraints, nodes={})
    else:
        for node in nodes:
            rest = {n: p for n, p in nodes.items() if n != node}
            found[f"node {node!r}"] = replace(constraints, nodes=rest)
    for glob in constraints.modules:
        rest = {g: p for g, p in constraints.modules.items() if g != glob}
        found[f"module {glob!r}"] = replace(constraints, modules=rest)
    return found


def _instead(
    joint: JointGraph, name: str, built: Built, chosen: Sequence[int], constraints: Constraints
) -> str:
    """What the plan without a constraint has where the constraint was."""

    def placed(node: str) -> str:
        group = built.group_of[node]
        return _words(given(built.problem.options[group][chosen[group]], 0))

    if name in (PARAMETERS, STATE):
        limit = next(
            (x for x in built.problem.limits if x.name in (name, PARAMETERS)),
            built.problem.limits[0],
        )
        return f"{name} of {int(limit.held(chosen))} bytes of parameters per device"
    if name.startswith("node "):
        node = name.removeprefix("node ").strip("'")
        by_name = {p.name: n for n, p in joint.placeholders.items() if p.kind == "parameter"}
        return f"{node} at {placed(by_name.get(node, node))}"
    if name == "inputs":
        ports = {p.index: n for n, p in joint.placeholders.items() if p.kind == "input"}
        return f"inputs at {', '.join(placed(ports[i]) for i in sorted(ports) if ports[i] in built.group_of)}"
    return f"no constraint on {name}"


def _words(placements: Sequence[Placement]) -> str:
    return f"({placement_text(placements).replace(' ', ', ')})"


def _constraints_in_model(joint: JointGraph) -> list[str]:
    """Lines of `with_sharding_constraint` in the model."""
    told = [placed_of(n) for n in joint.module.graph.nodes]
    return list(dict.fromkeys(t[1] for t in told if t is not None))
