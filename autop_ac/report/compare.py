"""Several settings of activation checkpointing in one table, with what each of its rows is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ACConfig
from .estimate import Estimate
from .text import duration, size, table_text, wrapped


@dataclass(frozen=True, slots=True)
class Compared:
    """One row.

    Attributes:
        name: of the row.
        words: what it is, in plain words; ``""`` where the settings say it.
        config: its settings.
        estimate: what they lead to; None where their budget cannot be met.
        kept_bytes: what they keep for backward.
        smallest_bytes: the smallest peak found, where the budget cannot be met.
    """

    name: str
    words: str
    config: ACConfig
    estimate: Estimate | None = None
    kept_bytes: int = 0
    smallest_bytes: int | None = None


def compare_table(rows: Sequence[Compared]) -> str:
    """The table as text, and below it a line for each row."""
    cells = []
    for row in rows:
        made = row.estimate
        if made is None:
            cells.append((row.name, "", "", "", "", "infeasible"))
            continue
        cells.append(
            (row.name, size(made.peak_bytes), size(row.kept_bytes), duration(made.time.recompute_s),
             duration(made.step_s), "fits" if made.fits else "does not fit")
        )  # fmt: skip
    made = next((row.estimate for row in rows if row.estimate is not None), None)
    heads = ("settings", "peak", "saved", "recomputation", "step", made.device if made else "")
    uncounted = any(r.estimate is not None and r.estimate.optimizer is None for r in rows)
    return "\n".join(
        (
            table_text(heads, cells, right=(1, 2, 3, 4)),
            *(["optimizer state not counted: --optimizer adamw"] if uncounted else []),
            "what each row is set to:",
            *map(_told, rows),
        )
    )


def _told(row: Compared) -> str:
    least = ""
    if row.estimate is None:
        least = "; no plan is within that budget"
        if row.smallest_bytes is not None:
            least += f", the smallest peak found is {size(row.smallest_bytes)}"
    words = f"{row.words}: " if row.words else ""
    return wrapped(f"  {row.name:8}  {words}{settings_text(row.config)}{least}")


def settings_text(config: ACConfig) -> str:
    """The settings that are not the defaults, as keywords: ``memory_budget=0.5``."""
    default = ACConfig().to_dict()
    given = {n: v for n, v in config.to_dict().items() if v != default[n]}
    if given.get("memory_budget") is not None:
        given.pop("stage_size", None)  # which a budget turns off
    said = [f"{n}={_quoted(v)}" for n, v in given.items()]
    return ", ".join(said) or f"the defaults, stage_size={_quoted(config.stage_size)}"


def _quoted(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
