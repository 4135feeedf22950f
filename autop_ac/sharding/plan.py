"""The outcome of the sharding search: a frozen value, one choice per node of the joint graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from ..errors import UsageError
from ..folding import fold_paths
from ..placements import placement_text

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
        objective_s: what the search minimises: predicted seconds of one step in which nothing is
            recomputed, of all choices together, less `hidden_s`. An `Estimate` has those of what runs.
        hidden_s: seconds of collectives that run beside computation.
        gap: relative gap to the solver's lower bound that was reached.
        notes: remarks and warnings in plain words.
        fingerprint: of the captured graph, ``""`` where it is not known.
        explainer: what `explain` asks; not part of the value, nor of what is saved.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    choices: Mapping[str, Choice] = field(repr=False)  # thousands; `explain` tells of each
    parameters: Mapping[str, Placements]
    objective_s: float
    gap: float = 0.0
    notes: tuple[str, ...] = ()
    hidden_s: float = 0.0
    fingerprint: str = ""
    explainer: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """One parameter a line, those of equal layers together."""
        mesh = ", ".join(f"{a}={n}" for a, n in zip(self.axis_names, self.mesh_shape, strict=True))
        rows = [(name, placement_text(p)) for name, p in self.parameters.items()]
        placed = [
            f"  {path}{f' x {len(members)}' if len(members) > 1 else ''}: {rows[members[0]][1]}"
            for path, members in fold_paths(rows)
        ]
        predicted = f"step by the search, nothing recomputed, {self.objective_s * 1e3:.3f} ms, gap {self.gap:.2%}"
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"ShardingPlan on mesh ({mesh}): {predicted}", *placed, *notes])

    def explain(self, target: Any = None, placements: Sequence[Placement] | None = None) -> Any:
        """Why a node, parameter or module is placed as it is, and what others would cost.

        Args:
            target: a node of the captured graph, its name, a parameter's name, or a module path or glob;
                None for the mesh axes: what sharding parameters along each of them saves.
            placements: one per mesh axis; the best plan that has them is searched for and compared.
                None prices each placement with all else as it is.

        Returns:
            An `Explanation` (for None an `Overview`), whose `str` is the text.

        Raises:
            UsageError: the plan came from a file: it knows no other costs than its own.
            ConfigError: nothing has that name.
        """
        if self.explainer is None:
            raise UsageError(
                "this plan knows its own placements alone: explain needs the plan as optimize_placement "
                "gives it, and not one that was loaded or pickled"
            )
        return self.explainer(self, target, placements)

    def diff(self, other: ShardingPlan) -> Any:
        """What `other` has different: a `PlanDiff`, whose `str` is the text."""
        from .difference import plan_diff

        return plan_diff(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON.

        Raises:
            PlanFileError: there is no such folder.
        """
        from .plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Read what `save` wrote.

        Raises:
            PlanFileError: not there (a `FileNotFoundError` too), cut off, no plan, or of another version.
        """
        from .plan_file import load_plan

        return load_plan(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "explainer": None}
