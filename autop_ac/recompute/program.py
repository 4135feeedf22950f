"""Rows of a linear program in parts that are written once and put together many times.

A part has columns of its own after those that all parts share; ``sum <= right`` in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

SOLVER: Any = highspy.Highs.__base__  # the class on top of it prints a banner when it is made
_INFINITY = highspy.kHighsInf
_ITERATIONS = 1  # of the simplex method, a column or row


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows over shared columns and, numbered from `shared` on, columns of its own.

    Attributes:
        shared: how many columns are shared.  own: how many are not.
        lengths: terms of each row.
        index, value: columns and factors, row by row.
        right: right hand sides.
    """

    shared: int
    own: int
    lengths: np.ndarray
    index: np.ndarray
    value: np.ndarray
    right: np.ndarray

    def placed(self, first: int) -> np.ndarray:
        """The columns when its own start at `first`."""
        return np.where(self.index >= self.shared, self.index + (first - self.shared), self.index)


class Writer:
    """Writes a part; a row said twice is written once."""

    def __init__(self, shared: int) -> None:
        self._shared = self._next = shared
        self._rows: dict[tuple[tuple[tuple[int, float], ...], float], None] = {}

    def column(self) -> int:
        """A new column between zero and one."""
        self._next += 1
        return self._next - 1

    def row(self, terms: dict[int, float], right: float) -> None:
        """``sum of terms <= right``."""
        self._rows[tuple(sorted(terms.items())), right] = None

    def part(self) -> Part:
        """What was written."""
        rows = list(self._rows)
        return Part(
            self._shared,
            self._next - self._shared,
            np.array([len(terms) for terms, _ in rows], dtype=np.int32),
            np.array([column for terms, _ in rows for column, _ in terms], dtype=np.int32),
            np.array([factor for terms, _ in rows for _, factor in terms], dtype=np.float64),
            np.array([right for _, right in rows], dtype=np.float64),
        )


def add(terms: dict[int, float], column: int, factor: float) -> None:
    """Add ``factor * column`` to a sum."""
    terms[column] = terms.get(column, 0.0) + factor


def solver_of(low: Sequence[float], parts: Sequence[Part]) -> Any:
    """A HiGHS solver with these rows, without costs; `low` bounds the shared columns from below."""
    firsts = np.cumsum([len(low), *(p.own for p in parts)])
    columns = int(firsts[-1])
    lengths = np.concatenate([p.lengths for p in parts])
    rows = len(lengths)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, rows
    lp.col_cost_ = np.zeros(columns)
    lp.col_lower_ = np.concatenate((np.array(low), np.zeros(columns - len(low))))
    lp.col_upper_ = np.ones(columns)
    lp.row_lower_ = np.full(rows, -_INFINITY)
    lp.row_upper_ = np.concatenate([p.right for p in parts])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, rows
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lp.a_matrix_.index_ = np.concatenate(
        [p.placed(int(first)) for p, first in zip(parts, firsts[:-1], strict=True)]
    ).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate([p.value for p in parts])
    solver = SOLVER()
    for name, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(name, setting)
    solver.setOptionValue("simplex_iteration_limit", _ITERATIONS * (columns + rows) + 1000)
    solver.passModel(lp)
    return solver
