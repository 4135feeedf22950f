"""What a report is made of: the frozen values behind it, for whoever asks for more than a summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config import OPTIMIZER_COPIES, ACConfig
from ..errors import ConfigError
from ..graph.devices import DeviceSpec, find_device
from ..graph.facts import Facts
from ..graph.timeline import Timeline, step_time, timeline
from ..recompute.collectives import parameter_chains
from ..recompute.evaluate import Outcome
from ..recompute.pipeline import least_recomputed
from ..recompute.plan import RecomputePlan
from ..sharding.plan import ShardingPlan


@dataclass(frozen=True, eq=False, slots=True)
class Basis:
    """One plan for one graph.

    Attributes:
        facts, plan: the local graph, and what was decided about it.
        sharding: where tensors lie; None on one device.
        device: the described device.
        trained: names of the parameters that get a gradient.
        names: by a name that `checkpoint_name` gave, the captured values that have it.
        config: the settings of AC that the plan was made with.
    """

    facts: Facts
    plan: RecomputePlan
    sharding: ShardingPlan | None = None
    device: DeviceSpec = field(default_factory=lambda: find_device("cpu"))
    trained: frozenset[str] = frozenset()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    config: ACConfig = ACConfig()

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.sharding.mesh_shape) if self.sharding else 1

    @property
    def where(self) -> str:
        """Whose bytes are counted, in words."""
        return "on one device" if self.devices == 1 else f"on each of {self.devices} devices"

    @property
    def usable_bytes(self) -> int:
        """Nine tenths of the device's memory, what ``memory_budget="device"`` takes."""
        return self.device.memory_bytes * 9 // 10

    @property
    def recompute_s(self) -> float:
        """Predicted seconds of all that backward runs again in one step."""
        return step_time(self.facts, self.plan.saved).recompute_s

    @property
    def least_recomputed(self) -> Outcome:
        """What is predicted where all is kept that nothing binding recomputes."""
        return least_recomputed(self.facts, self.plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings and remarks: of the plan, of its budget, of the placements."""
        budget = self.plan.budget.notes if self.plan.budget else ()
        return (*self.plan.notes, *budget, *(self.sharding.notes if self.sharding else ()))

    def timeline(self, optimizer: str | None = None) -> Timeline:
        """Who holds memory at every step.

        Args:
            optimizer: counts the state of this one; None for the state that the plan counts.

        Raises:
            ConfigError: no optimizer of that name is known.
        """
        gathered = parameter_chains(self.facts)
        held = None if optimizer is None else optimizer_bytes(self.facts, self.trained, optimizer)
        return timeline(self.facts, self.plan.saved, gathered, held)


def optimizer_bytes(facts: Facts, trained: frozenset[str], optimizer: str) -> int:
    """Bytes of optimizer state on one device, in the dtype of the parameter shards.

    Raises:
        ConfigError: no optimizer of that name is known.
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise ConfigError(
            f"optimizer={optimizer!r}: allowed are {', '.join(OPTIMIZER_COPIES)}; None counts the state "
            "that the settings name"
        )
    parameters = [v for v in facts.values if v.role == "parameter" and v.parameter in trained]
    held = {s for v in parameters for s in v.storages}
    return OPTIMIZER_COPIES[optimizer] * sum(facts.storage_bytes[s] for s in held)
