"""What two plans of one graph have different."""

from __future__ import annotations

from dataclasses import dataclass

from ..placements import placement_text
from .plan import Choice, Placements, ShardingPlan


@dataclass(frozen=True, slots=True)
class Change:
    """One parameter, or what one node gives: placements in the first and in the second plan."""

    name: str
    before: Placements | None
    after: Placements | None

    def __str__(self) -> str:
        return f"{self.name}: {words(self.before)} -> {words(self.after)}"


@dataclass(frozen=True)
class PlanDiff:
    """From one plan to another; `str` gives it as text.

    Attributes:
        objective_s, compute_s, collectives_s, hidden_s: seconds that the second takes more.
        parameters, nodes: what is placed differently.
        only_here, only_there: names of nodes that one of them alone has.
    """

    objective_s: float
    compute_s: float
    collectives_s: float
    hidden_s: float
    parameters: tuple[Change, ...]
    nodes: tuple[Change, ...]
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not (self.parameters or self.nodes or self.only_here or self.only_there):
            return f"the same placements; step by the search {ms(self.objective_s)}"
        lines = [
            f"step by the search {ms(self.objective_s)}: computation {ms(self.compute_s)}, collectives "
            f"{ms(self.collectives_s)}, of which hidden {ms(self.hidden_s)}",
            f"{len(self.parameters)} parameters and {len(self.nodes)} nodes are placed differently",
            *(f"  {change}" for change in (*self.parameters, *self.nodes[:_SHOWN])),
        ]
        if len(self.nodes) > _SHOWN:
            lines.append(f"  and {len(self.nodes) - _SHOWN} more nodes")
        for names, where in ((self.only_here, "first"), (self.only_there, "second")):
            if names:
                lines.append(
                    f"  {len(names)} nodes are in the {where} plan alone, such as {names[0]}"
                )
        return "\n".join(lines)


_SHOWN = 20  # nodes that are listed in the text


def ms(seconds: float) -> str:
    """A difference for people: ``"+1.50 ms"``."""
    return f"{seconds * 1e3:+.3f} ms"


def words(placements: Placements | None) -> str:
    """``"(S(0), R)"``."""
    if placements is None:
        return "-"
    return f"({placement_text(placements).replace(' ', ', ')})"


def plan_diff(first: ShardingPlan, second: ShardingPlan) -> PlanDiff:
    """What `second` has different from `first`."""

    def total(plan: ShardingPlan, what: str) -> float:
        return sum(float(getattr(c, what)) for c in plan.choices.values())

    both = [name for name in first.choices if name in second.choices]
    return PlanDiff(
        objective_s=second.objective_s - first.objective_s,
        compute_s=total(second, "compute_s") - total(first, "compute_s"),
        collectives_s=total(second, "redistribute_s") - total(first, "redistribute_s"),
        hidden_s=second.hidden_s - first.hidden_s,
        parameters=tuple(
            Change(name, first.parameters.get(name), second.parameters.get(name))
            for name in dict.fromkeys((*first.parameters, *second.parameters))
            if first.parameters.get(name) != second.parameters.get(name)
        ),
        nodes=tuple(
            Change(name, _gives(first.choices[name]), _gives(second.choices[name]))
            for name in both
            if first.choices[name].outputs != second.choices[name].outputs
        ),
        only_here=tuple(n for n in first.choices if n not in second.choices),
        only_there=tuple(n for n in second.choices if n not in first.choices),
    )


def _gives(choice: Choice) -> Placements | None:
    return choice.outputs[0] if choice.outputs else None
