"""Rows of a report: modules, why their values are kept or not, and hints that were overridden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .text import WIDTH, broken, size, wrapped

UNREAD = "unread"
"""Action in a report of what is neither kept nor recomputed, because backward does not read it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why values of a module are kept or not.

    Attributes:
        action: "save", "recompute" or "unread".
        origin: who decided, ``"hint"``, ``"auto"``, ...
        reason: in plain words.
        values: how many values; views, getitems and waits count with what they belong to.
    """

    action: str
    origin: str
    reason: str
    values: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module path, or several equal layers folded into one.

    Attributes:
        module: path, with folded numbers as ``layers.0-3``; ``""`` at the root.
        layers: how many equal modules the row stands for.
        saved_bytes: what they allocate that is kept at the end of forward, all of them together.
        recomputed_bytes: what backward computes again of them, all of them together.
        reasons: most values first, those of all of them counted.
    """

    module: str
    layers: int
    saved_bytes: int
    recomputed_bytes: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A hint or rule that a higher one overrode.

    Attributes:
        asked: "save" or "recompute".  reason, source: whose wish it was, and where it is written.
        module: where, equal layers folded.
        values: names of the values it was set aside for.
        decided_by: the origin and reason that prevailed.
    """

    asked: str
    reason: str
    source: str
    module: str
    values: tuple[str, ...]
    decided_by: str


HEADINGS = ("module", "layers", "saved", "recomputed")
_DONE = {"save": "saved", "recompute": "recomputed", UNREAD: "not read by backward"}


def in_words(reasons: Sequence[Reason]) -> list[str]:
    """Why, but for what backward does not read and nobody asked for."""
    return [
        f"{r.values} {_DONE[r.action]}: {r.reason.removeprefix('recomputed ')} ({r.origin})"
        for r in reasons
        if r.action != UNREAD or r.origin != "default"
    ]


_NAMES = WIDTH - 8 - 14 - 14


def listing(rows: Sequence[ModuleRow]) -> list[str]:
    """Modules with numbers, the reasons below each: a column of reasons would leave no room for names."""

    def line(name: str, layers: str, kept: str, again: str) -> str:
        return f"{name:{_NAMES}}{layers:>8}{kept:>14}{again:>14}"

    found = [line(*HEADINGS), "-" * WIDTH]
    for row in rows:
        *before, name = broken(row.module or "(root)").split("\n")
        if len(name) > _NAMES:  # one word of that length: its numbers go below
            before, name = [*before, name], ""
        sizes = [size(count) if count else "-" for count in (row.saved_bytes, row.recomputed_bytes)]
        found += [*before, line(name, str(row.layers), *sizes)]
        found += [wrapped(f"      {words}") for words in in_words(row.reasons)]
    return found
