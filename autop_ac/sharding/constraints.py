"""What the user asks of the search, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import ConfigError
from .plan import Placements

PortPlacements = tuple[Placements | None, ...]


@dataclass(frozen=True)
class Constraints:
    """Limits on the plan.

    Attributes:
        inputs: placements of each tensor input by `Port.index`, an entry None where it is free; None
            for the default (the batch is sharded on the first mesh axis).
        outputs: the same for the tensor outputs.
        parameter_low, parameter_high: bounds on the parameter bytes of one device, as a fraction of
            all parameter bytes, in [0, 1].
        nodes: placements that a node's first output must have, by node name.
        modules: placements of what a module's forward hands to others, by a glob on module paths.
        state_bytes: the most that parameters, their gradients and the optimizer's state take on one device.
        whole_on: mesh axes that parameters are not sharded on.
        state_copies: how many values of the size of each parameter the optimizer holds.
    """

    inputs: PortPlacements | None = None
    outputs: PortPlacements | None = None
    parameter_low: float | None = None
    parameter_high: float | None = None
    nodes: Mapping[str, Placements] = field(default_factory=dict)
    modules: Mapping[str, Placements] = field(default_factory=dict)
    state_bytes: int | None = None
    state_copies: int = 2
    whole_on: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("parameter_low", "parameter_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1):
                raise ConfigError(
                    f"{name}={value!r} must be a fraction of the parameter bytes in [0, 1], such as "
                    "1 / mesh.size(); None for no limit"
                )
        low, high = self.parameter_low, self.parameter_high
        if low is not None and high is not None and low > high:
            raise ConfigError(f"parameter_low={low} is above parameter_high={high}")
