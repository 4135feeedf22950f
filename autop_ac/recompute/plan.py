"""The outcome of the recompute part: one decision per forward value, who took it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

Action = Literal["save", "recompute"]


class Origin(IntEnum):
    """Who decided; a smaller number overrides a larger one (the total order of precedence)."""

    CORRECTNESS = 1
    CONTRACT = 2
    HINT = 3
    RULE = 4
    AUTO = 5
    DEFAULT = 6


@dataclass(frozen=True, slots=True)
class Wish:
    """What one origin asks of one forward value; several may stand against each other.

    Attributes:
        action: what is asked.
        origin: who asks.
        reason: plain words, for the report, e.g. ``'ac_region "attention" saves aten.mm'``.
        source: ``"file.py:12"`` of the hint, or ``""``.
        prefer: a preference, which the automatic part may go against where its limit demands it.
    """

    action: Action
    origin: Origin
    reason: str
    source: str = ""
    prefer: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for one forward value, with the wishes that it set aside.

    `prefer` says that a preference decided, with no order of a hint or rule beneath it.
    """

    value: int
    action: Action
    origin: Origin
    reason: str
    overridden: tuple[Wish, ...] = ()
    prefer: bool = False


@dataclass(frozen=True, slots=True)
class BudgetResult:
    """What a memory budget led to.

    Attributes:
        budget_bytes: the budget.
        peak_bytes: predicted peak, at most the budget.
        recompute_time_s: predicted seconds of recomputation in one step.
        lower_bound_s: no choice within the budget takes less.
        gap: how far the time can be above the least, as a fraction of it: 0.0 where exact.
        exact: all choices were compared, or the bound proves that none is better.
        given_up: roots whose preference is set aside, since the budget cannot be met with it.
        notes: remarks for the report, in plain words.
    """

    budget_bytes: int
    peak_bytes: int
    recompute_time_s: float
    lower_bound_s: float
    gap: float
    exact: bool
    given_up: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """A decision for each forward value, and the saved set that follows from them.

    Attributes:
        decisions: by value index, exactly the forward values.
        saved: indices, ascending, of what is kept from forward to backward: forward values only
            (graph inputs that backward reads are alive anyway and are in `saved_inputs`).
        saved_inputs: indices of graph inputs that backward reads.
        stage_bytes: the stage size used, None where no stages were made.
        notes: warnings and remarks for the report, in plain words.
        budget: what the memory budget led to, None where none was given.
    """

    decisions: Mapping[int, Decision]
    saved: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    stage_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())
    budget: BudgetResult | None = None
