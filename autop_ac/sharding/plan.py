"""The outcome of the sharding search: a frozen value, one choice per node of the joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Placements of one node: of what it reads and of what it gives.

    Attributes:
        node: name of the node in the captured joint graph.
        inputs: placements required of each tensor argument, one entry per FX-node leaf of
            ``pytree.arg_tree_leaves(*node.args, **node.kwargs)`` in that order; None for a leaf that
            is no tensor (a symbolic size).
        outputs: one entry per output of the operator (one for a single tensor); None where the
            output is no tensor. Placeholders have no inputs and one output.
        compute_s: predicted seconds of the local computation.
        redistribute_s: predicted seconds of the collectives that bring its inputs into place.
    """

    node: str
    inputs: tuple[Placements | None, ...]
    outputs: tuple[Placements | None, ...]
    compute_s: float = 0.0
    redistribute_s: float = 0.0


@dataclass(frozen=True)
class ShardingPlan:
    """A placement for every tensor of the joint graph.

    ``getitem`` nodes have no entry: what they read is ``choices[producer].outputs[index]``.

    Attributes:
        mesh_shape: sizes of the mesh axes.  axis_names: their names.
        choices: by node name, placeholders and the ``"output"`` node included. The output node's
            `inputs` say how each result is brought out.
        parameters: placements by the user's parameter and buffer name.
        objective_s: predicted seconds of one step: of all choices together, less `hidden_s`.
        hidden_s: seconds of collectives that run beside computation.
        gap: relative gap to the solver's lower bound that was reached.
        notes: remarks and warnings in plain words.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    choices: Mapping[str, Choice]
    parameters: Mapping[str, Placements]
    objective_s: float
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    hidden_s: float = 0.0
