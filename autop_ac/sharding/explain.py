"""Why a plan places something as it does: what the other placements would cost.

Without placements asked for, each is priced with all else as it is: the option with that placement that costs
least next to the neighbours' choices. With placements, the search runs again with the node held there, so
that the neighbours may change too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.joint import JointGraph
from ..capture.names import module_path
from ..errors import ConfigError, InfeasibleError, SolverError
from ..near import did_you_mean
from .build import Built, build_problem
from .constraints import Constraints
from .difference import PlanDiff, ms, plan_diff, words
from .fixed import instance_of
from .formulation import evaluate
from .groups import Settings
from .layout import local_bytes
from .option import Option
from .plan import Placements, ShardingPlan


@dataclass(frozen=True, slots=True)
class Alternative:
    """One placement of a node.

    Attributes:
        placements: of what the node gives.
        more_s: seconds that the step takes more than with the plan's own, all else as it is; None where
            something forbids it.
        why_not: what forbids it, or "".
    """

    placements: Placements
    more_s: float | None
    why_not: str = ""


@dataclass(frozen=True)
class NodeReason:
    """A node's placement, next to the others that it could have; the best first."""

    name: str
    op: str
    chosen: Placements | None
    compute_s: float
    redistribute_s: float
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.name} ({self.op}) is {words(self.chosen)}: computation {self.compute_s * 1e3:.3f} ms, "
            f"collectives for its inputs {self.redistribute_s * 1e3:.3f} ms"
        ]
        for other in self.alternatives:
            price = other.why_not if other.more_s is None else ms(other.more_s)
            lines.append(f"    {words(other.placements)}: {price}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """Why, in values; `str` gives the text.

    Attributes:
        target: what was asked for.
        nodes: a reason for each node of it.
        asked: the placements asked for; None without.
        difference: from the plan to the best one with these; None without, or where there is none.
        why_not: why there is no plan with these.
    """

    target: str
    nodes: tuple[NodeReason, ...]
    asked: Placements | None = None
    difference: PlanDiff | None = None
    why_not: str = ""

    def __str__(self) -> str:
        if self.asked is None:
            return "\n".join([f"{self.target}:", *map(str, self.nodes)])
        if self.difference is None:
            return f"{self.target} at {words(self.asked)}: no plan. {self.why_not}"
        return f"{self.target} at {words(self.asked)}, the rest as is best then: {self.difference}"


@dataclass(frozen=True, slots=True)
class AxisSaving:
    """What sharding parameters along one mesh axis changes, against the best plan that does not.

    Attributes:
        axis, devices: of the mesh.
        sharded: how many parameters are sharded along it.
        state_bytes: that parameters, gradients and the state of AdamW take less on one device.
        time_s: that a step takes less; below zero where it takes more; None where a constraint leaves no
            plan with parameters whole along the axis.
    """

    axis: str
    devices: int
    sharded: int
    state_bytes: int
    time_s: float | None

    def __str__(self) -> str:
        saved = f"{self.state_bytes / 2**30:.2f} GiB"
        if not self.sharded:
            both = "nothing is sharded along it"
        elif self.time_s is None:
            both = "the constraints leave no plan without that"
        else:
            time = f"{abs(self.time_s) * 1e3:.3f} ms"
            both = (
                f"saves {saved} and {time}" if self.time_s >= 0 else f"saves {saved}, costs {time}"
            )
            both += " a step"
        return f"{self.axis}={self.devices}: {self.sharded} parameters are sharded along it; {both}"


@dataclass(frozen=True)
class Overview:
    """What the plan does with parameters along each mesh axis, and what that saves."""

    axes: tuple[AxisSaving, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                "against the best plan with parameters whole along one mesh axis, on each device "
                "(parameters, gradients, state of AdamW):",
                *(f"  {axis}" for axis in self.axes),
            ]
        )


class Explainer:
    """Answers for the plans of one graph; the problem is built when first asked."""

    def __init__(
        self,
        joint: JointGraph,
        constraints: Constraints,
        settings: Settings,
        again: Callable[[Constraints], ShardingPlan],
    ) -> None:
        self.joint, self.constraints, self.settings = joint, constraints, settings
        self.again = again

    @functools.cached_property
    def built(self) -> Built:
        """The program without shared variables, so that one node can change alone."""
        return build_problem(self.joint, self.constraints, replace(self.settings, fold=False))

    def __call__(
        self, plan: ShardingPlan, target: Any, placements: Sequence[Any] | None
    ) -> Explanation | Overview:
        """See `ShardingPlan.explain`."""
        if target is None:
            return self._overview(plan)
        text = target if isinstance(target, str) else target.name
        nodes = self._nodes(text)
        if placements is None:
            chosen = self._chosen(plan)
            return Explanation(text, tuple(self._reason(plan, node, chosen) for node in nodes))
        wanted = tuple(placements)
        held = {**self.constraints.nodes, **{node.name: wanted for node in nodes}}
        try:
            other = self.again(replace(self.constraints, nodes=held))
        except (InfeasibleError, ConfigError) as error:
            return Explanation(text, (), wanted, None, str(error))
        return Explanation(text, (), wanted, plan_diff(plan, other))

    def _overview(self, plan: ShardingPlan) -> Overview:
        axes = []
        for axis, (name, devices) in enumerate(zip(plan.axis_names, plan.mesh_shape, strict=True)):
            sharded = sum(p[axis].is_shard() for p in plan.parameters.values())
            other: ShardingPlan | None = plan
            if sharded:
                unbounded = {"parameter_high": None, "parameter_low": None, "state_bytes": 1 << 62}
                whole = replace(self.constraints, whole_on=(axis,), **unbounded)  # type: ignore[arg-type]
                other = self._again_or_none(whole)
            if other is None:
                axes.append(AxisSaving(name, devices, sharded, 0, None))
                continue
            saved = self._state_bytes(other) - self._state_bytes(plan)
            time_s = other.objective_s - plan.objective_s
            axes.append(AxisSaving(name, devices, sharded, saved, time_s))
        return Overview(tuple(axes))

    def _again_or_none(self, constraints: Constraints) -> ShardingPlan | None:
        try:
            return self.again(constraints)
        except (InfeasibleError, ConfigError):  # a parameter is held there, by node or module
            return None

    def _state_bytes(self, plan: ShardingPlan) -> int:
        """Bytes of parameters, gradients and two copies of each, on one device."""
        total = 0
        for node in self.joint.module.graph.find_nodes(op="placeholder"):
            port = self.joint.placeholders[node.name]
            if port.kind == "parameter":
                value, placements = node.meta["val"], plan.parameters[port.name]
                size = value.element_size()
                total += 4 * local_bytes(value.shape, size, placements, plan.mesh_shape)
        return total

    def _nodes(self, text: str) -> list[torch.fx.Node]:
        """The node or parameter of that name, or what the module of that path computes in forward."""
        groups = self.built.group_of
        by_user = {p.name: n for n, p in self.joint.placeholders.items()}
        all_nodes = {n.name: n for n in self.joint.module.graph.nodes if n.name in groups}
        if text in all_nodes:
            return [all_nodes[text]]
        if by_user.get(text) in all_nodes:
            return [all_nodes[by_user[text]]]
        paths = {n: self._path(n) for n in all_nodes.values()}
        inside = [n for n, path in paths.items() if path and instance_of(text, path) is not None]
        if not inside:
            known = [*by_user, *all_nodes, *dict.fromkeys(paths.values())]
            hint = did_you_mean(text, filter(None, known))
            raise ConfigError(f"no node, parameter or module {text!r} in the plan's graph{hint}")
        return inside

    def _path(self, node: torch.fx.Node) -> str:
        if node.op == "placeholder":
            port = self.joint.placeholders[node.name]
            return port.name.rpartition(".")[0] if port.kind == "parameter" else ""
        stack = node.meta.get("nn_module_stack")
        return module_path(stack, prefix=self.joint.module_prefix)

    def _chosen(self, plan: ShardingPlan) -> list[int]:
        """The plan as a choice of options."""
        built = self.built
        chosen = [0] * len(built.problem.options)
        outgoing = plan.choices[self.joint.module.graph.output_node().name].inputs
        brought = dict(zip(built.result_groups, outgoing, strict=True))
        for name, group in built.group_of.items():
            options = built.problem.options[group]
            if name in plan.choices:
                choice = plan.choices[name]
                chosen[group] = _number(options, choice.inputs, choice.outputs, name)
            elif (group, 0) in brought:
                chosen[group] = _number(options, (brought[group, 0],), (), name)
        return chosen

    def _reason(self, plan: ShardingPlan, node: torch.fx.Node, chosen: list[int]) -> NodeReason:
        problem, group = self.built.problem, self.built.group_of[node.name]
        own = evaluate(problem, chosen)
        best: dict[Placements, Alternative] = {}
        choice = plan.choices[node.name]
        for number, option in enumerate(problem.options[group]):
            given = option.outputs[0] if option.outputs else None
            if given is None or given == choice.outputs[0]:
                continue
            changed = [*chosen[:group], number, *chosen[group + 1 :]]
            try:
                other = Alternative(given, evaluate(problem, changed) - own)
            except SolverError as error:
                other = Alternative(given, None, str(error))
            if given not in best or _rank(other) < _rank(best[given]):
                best[given] = other
        return NodeReason(
            name=node.name,
            op=str(node.target),
            chosen=choice.outputs[0] if choice.outputs else None,
            compute_s=choice.compute_s,
            redistribute_s=choice.redistribute_s,
            alternatives=tuple(sorted(best.values(), key=_rank)),
        )


def _rank(other: Alternative) -> float:
    return float("inf") if other.more_s is None else other.more_s


def _number(options: Sequence[Option], inputs: Any, outputs: Any, name: str) -> int:
    for number, option in enumerate(options):
        if option.inputs == tuple(inputs) and option.outputs == tuple(outputs):
            return number
    raise ConfigError(
        f"the plan's placement of {name} is none of this graph's: it is another graph"
    )
