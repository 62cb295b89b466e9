"""The fractions that make the worst of several sums smallest: a linear program, by the simplex method."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_PIVOTS = 30  # for each column, at most: what there is by then is a solution too, if not the best
_ZERO = 1e-11
_LEAST = 1e-7  # of the largest cost: less costs nothing, and would look like nothing to the pivots
_CLOSE = 1e-9  # by so much of the worst sum another may be above it
_ROUNDS = 50  # of adding rows, at most: each adds one at least, and few suffice


def minimax(costs: F64) -> F64:
    """float64[columns], not negative, adding up to 1: minimises max(costs @ x).

    costs: float64[rows, columns], not negative; every column has a positive one. No more rows bind than there
    are columns. So of many rows a few are taken, and then those that the best x for these breaks, until there
    are
    none: what is best for some of the rows and breaks no other is best for all (cutting planes; Kelley 1960).
    """
    rows, columns = costs.shape
    if rows <= 3 * columns:
        return _simplex(costs)
    sums = costs.mean(axis=1)
    taken = np.union1d(np.argsort(sums)[-columns:], costs.argmax(axis=0))  # each column has a positive one
    for _ in range(_ROUNDS):
        x = _simplex(costs[taken])
        sums = costs @ x
        broken = np.flatnonzero(sums > (1 + _CLOSE) * sums[taken].max())
        if not len(broken):
            return x
        taken = np.union1d(taken, broken[np.argsort(sums[broken])[-columns:]])
    return _simplex(costs)


def _simplex(costs: F64) -> F64:
    """As `minimax`, of all rows at once. With y = x / t it is: maximise sum(y) where costs @ y <= 1, a
    program that y = 0 fits (Dantzig 1951: games as linear programs).
    """
    table = (costs / costs.max()).clip(_LEAST)
    rows, columns = table.shape
    limits = np.ones(rows)  # values of the basic variables, one a row
    gains = np.ones(columns)  # what the sum gains by each of the others
    basic = np.arange(columns, columns + rows)  # below `columns`: a y, else a slack
    other = np.arange(columns)
    for _ in range(_PIVOTS * columns):
        enters = int(gains.argmax())
        if gains[enters] <= _ZERO:
            break
        slopes = table[:, enters].copy()
        ratios = np.full(rows, np.inf)
        np.divide(limits, slopes, out=ratios, where=slopes > _ZERO)
        leaves = int(ratios.argmin())
        pivot = slopes[leaves]
        row = table[leaves] / pivot
        row[enters] = 1 / pivot
        slopes[leaves] = 0.0
        limit = limits[leaves] / pivot
        table[:, enters] = 0.0
        table -= np.outer(slopes, row)
        table[leaves] = row
        limits -= slopes * limit
        limits[leaves] = limit
        gain = gains[enters]
        gains[enters] = 0.0
        gains -= gain * row
        basic[leaves], other[enters] = other[enters], basic[leaves]
    y: F64 = np.zeros(columns)
    chosen = basic < columns
    y[basic[chosen]] = limits[chosen].clip(0)
    y /= y.sum()
    return y
