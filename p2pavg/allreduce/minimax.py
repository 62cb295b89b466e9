"""The fractions that make the worst of several sums smallest: a linear program, by the simplex method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from p2pavg import native
from p2pavg.native import compiled

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_PIVOTS = 30  # for each column, at most: what there is by then is a solution too, if not the best
_ZERO = 1e-11
_LEAST = 1e-7  # of the largest cost: less costs nothing, and would look like nothing to the pivots
_CLOSE = 1e-9  # by so much of the worst sum another may be above it
_ROUNDS = 50  # of adding rows, at most: each adds one at least, and few suffice


@dataclass(frozen=True)
class Costs:
    """A table of costs, none negative; most rows are nearly empty. Every column has a positive one."""

    full: F64  # float64[rows, columns]: the first rows
    places: I64  # int64[columns, entries]: of each column's entries in the rows that follow, which row
    entries: F64  # float64[columns, entries]; no column has two in one row
    sparse: int  # rows that follow

    @property
    def columns(self) -> int:
        """Of the table."""
        return int(self.full.shape[1])

    def sums(self, x: F64) -> F64:
        """float64[rows]: the table times x."""
        weighed = (self.entries * x[:, None]).ravel()
        return np.concatenate([self.full @ x, np.bincount(self.places.ravel(), weighed, self.sparse)])

    def rows(self, wanted: I64) -> F64:
        """float64[wanted, columns]: these rows; `wanted` is sorted."""
        first = int(np.searchsorted(wanted, len(self.full)))
        table = np.zeros((len(wanted), self.columns))
        table[:first] = self.full[wanted[:first]]
        at = np.full(self.sparse, -1)
        at[wanted[first:] - len(self.full)] = np.arange(first, len(wanted))
        row = at[self.places.ravel()]
        there = np.flatnonzero(row >= 0)
        table[row[there], there // self.entries.shape[1]] = self.entries.ravel()[there]
        return table

    @cached_property
    def least(self) -> tuple[F64, F64]:
        """float64[rows] and float64[sparse rows]: the least cost in each row."""
        there = self.places[self.entries > 0]
        crowded = np.bincount(there, minlength=self.sparse) == self.columns  # else some column costs nothing
        found = np.where(crowded, np.inf, 0.0)
        if crowded.any():
            np.minimum.at(
                found, self.places.ravel(), np.where(self.entries > 0, self.entries, np.inf).ravel()
            )
        return self.full.min(axis=1), found

    @cached_property
    def worst(self) -> I64:
        """int64[columns]: in which row each column costs most."""
        columns = np.arange(self.columns)
        dear, entry = self.full.argmax(axis=0), self.entries.argmax(axis=1)
        found: I64 = np.where(
            self.full[dear, columns] >= self.entries[columns, entry],
            dear,
            len(self.full) + self.places[columns, entry],
        )
        return found


def minimax(costs: Costs) -> F64:
    """float64[columns], not negative, adding up to 1: minimises max(costs.sums(x)).

    With y = x / t it is: maximise sum(y) where the table times y is at most 1, a program that y = 0 fits
    (Dantzig 1951: games as linear programs). No more rows bind than there are columns. So of many rows a few
    are taken, and then those that the best x for these breaks, until there are none: what is best for some of
    the rows and breaks no other is best for all (cutting planes; Kelley 1960).
    """
    columns = costs.columns
    sums = costs.sums(np.full(columns, 1 / columns))
    # The costliest row of each column is among them, so each column costs something.
    taken = np.union1d(_largest(sums, columns // 4), costs.worst)
    rows = costs.rows(taken)
    unit = float(rows.max())
    program = compiled.Simplex(columns) if native.available() else Simplex(columns)
    y = np.zeros(columns)
    broken = taken
    for _ in range(_ROUNDS):
        program.add(_scaled(rows, unit))
        program.solve(y, _PIVOTS * columns)
        x: F64 = y / y.sum()
        sums = costs.sums(x)
        broken = np.flatnonzero(sums > (1 + _CLOSE) * sums[taken].max())
        if not len(broken):
            break
        broken = np.sort(broken[_largest(sums[broken], columns // 4)])
        taken, rows = np.union1d(taken, broken), costs.rows(broken)
    return x


def _largest(values: F64, count: int) -> I64:
    """Where the `count` largest stand, one at least."""
    count = max(1, count)
    return np.argpartition(values, -count)[-count:] if len(values) > count else np.arange(len(values))


def _scaled(rows: F64, unit: float) -> F64:
    """Costs in this unit; what costs less than the least that pivots can tell from nothing costs that."""
    return np.where(rows > 0, (rows / unit).clip(_LEAST), 0.0)


class Simplex:
    """Maximises the sum of y where each row times y is at most 1 and y >= 0. Rows that are added later are
    met by dual pivots from where the last solution stands (Lemke 1954). The twin of csrc/cpu/simplex.cpp.
    """

    def __init__(self, columns: int) -> None:
        self._table = np.zeros((0, columns))
        self._limits = np.zeros(0)  # values of the basic variables, one a row
        self._gains = np.ones(columns)  # what the sum gains by each of the others
        self._basic = np.zeros(0, np.int64)  # below `columns`: a y, else a slack
        self._other = np.arange(columns)

    def add(self, rows: F64) -> None:
        """float64[rows, columns], not negative."""
        columns, count = len(self._gains), len(self._basic)
        padded = np.concatenate([rows, np.zeros((len(rows), count + 1))], axis=1)
        known = padded[:, self._basic]  # 0.0 of a slack
        self._table = np.concatenate([self._table, padded[:, self._other] - known @ self._table])
        self._limits = np.concatenate([self._limits, 1.0 - known @ self._limits])
        self._basic = np.concatenate([self._basic, columns + count + np.arange(len(rows))])

    def solve(self, y: F64, most: int) -> None:
        """y <- the solution. most: pivots, at most."""
        for _ in range(most if len(self._basic) else 0):  # without rows nothing holds the sum back
            if not self._repair() and not self._improve():
                break
        chosen = self._basic < len(y)
        y[:] = 0.0
        y[self._basic[chosen]] = self._limits[chosen].clip(0)

    def _improve(self) -> bool:
        """False: nothing gains."""
        enters = int(self._gains.argmax())
        slopes = self._table[:, enters]
        ratios = np.full(len(slopes), np.inf)
        np.divide(self._limits, slopes, out=ratios, where=slopes > _ZERO)
        leaves = int(ratios.argmin())
        if self._gains[enters] <= _ZERO or ratios[leaves] == np.inf:
            return False
        self._pivot(leaves, enters)
        return True

    def _repair(self) -> bool:
        """False: no row is broken."""
        leaves = int(self._limits.argmin())
        if self._limits[leaves] >= -_ZERO:
            return False
        slopes = self._table[leaves]
        ratios = np.full(len(slopes), np.inf)
        np.divide(self._gains, slopes, out=ratios, where=slopes < -_ZERO)
        enters = int(ratios.argmin())
        if ratios[enters] == np.inf:
            return False
        self._pivot(leaves, enters)
        return True

    def _pivot(self, leaves: int, enters: int) -> None:
        table, limits, gains = self._table, self._limits, self._gains
        slopes = table[:, enters].copy()
        table[:, enters] = 0.0
        pivot, gain = slopes[leaves], gains[enters]
        row = table[leaves] / pivot
        row[enters] = 1 / pivot
        slopes[leaves] = 0.0
        limit = limits[leaves] / pivot
        table -= np.outer(slopes, row)
        table[leaves] = row
        limits -= slopes * limit
        limits[leaves] = limit
        gains[enters] = 0.0
        gains -= gain * row
        self._basic[leaves], self._other[enters] = self._other[enters], self._basic[leaves]
