"""Equal layers in one row: ``layers.0`` to ``layers.3`` become ``layers.0-3``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

_Group = tuple[tuple[str, ...], tuple[int, ...]]  # parts of a path, indices of rows


def fold_paths(rows: Sequence[tuple[str, Hashable]]) -> list[tuple[str, tuple[int, ...]]]:
    """Group rows whose paths are equal or differ in numbers only, and whose keys are equal.

    Numbers are folded one place of the path after the other, the deepest first, so that ``a.0.b.0``,
    ``a.0.b.1``, ``a.1.b.0``, ``a.1.b.1`` become ``a.0-1.b.0-1``; what is left over stays apart.

    Args:
        rows: path and key of each row; only rows with equal keys are folded.

    Returns:
        For each group its path and the indices of its rows, in order of first appearance.
    """
    groups: list[_Group] = [(tuple(path.split(".")), (i,)) for i, (path, _) in enumerate(rows)]
    depth = max((len(parts) for parts, _ in groups), default=0)
    for place in reversed(range(depth)):
        groups = _fold_at(place, groups, [key for _, key in rows])
    return [(".".join(parts), members) for parts, members in groups]


def _fold_at(place: int, groups: Sequence[_Group], keys: Sequence[Hashable]) -> list[_Group]:
    alike: dict[Hashable, list[_Group]] = {}
    for parts, members in groups:
        numbered = place < len(parts) and parts[place].isdecimal()
        pattern = (*parts[:place], "*", *parts[place + 1 :]) if numbered else parts
        alike.setdefault((pattern, keys[members[0]]), []).append((parts, members))
    folded = []
    for (first, members), *others in alike.values():
        parts = first
        if others and place < len(first) and first[place].isdecimal():
            numbers = [int(p[place]) for p, _ in ((first, members), *others)]
            parts = (*first[:place], ranges(numbers), *first[place + 1 :])
        folded.append((parts, (*members, *(i for _, m in others for i in m))))
    return folded


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def unnumbered(reason: str) -> str:
    """Equal layers lie in different stages: without its number the reason is one for all."""
    return re.sub(r"\bstage \d+", "its stage", reason)
