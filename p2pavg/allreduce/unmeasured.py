"""What a link between regions is taken to bring before anybody has measured it, where others have been. Pure.

A plan that took such links to be without limit would send most of a vector over them: over those of a
newcomer, or over the few that the last run did not remember.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Way = tuple[int, int]  # from a rank, or a region, to another


def assumed(rates: F64, groups: Sequence[int]) -> F64:
    """float64[members, members]: the rates, with what is assumed of links between regions that have none: the
    rate of the way back; else the median of those between the same two regions, of those that share an end,
    or of all between regions. Links inside a region stay unknown.

    rates: float64[members, members], from rank to rank in any unit; 0.0 where not measured. groups: the
    region of each member.
    """
    far = np.not_equal.outer(groups, groups)
    known, missing = far & (rates > 0), far & (rates <= 0)
    if not known.any() or not missing.any():
        return rates
    measured = {(int(a), int(b)): float(rates[a, b]) for a, b in np.argwhere(known)}
    between, of_end, found = _middles(measured, groups), _middles_of_ends(measured), rates.copy()
    middle = statistics.median(measured.values())
    for a, b in np.argwhere(missing).tolist():
        ends = [of_end[end] for end in (a, b) if end in of_end]
        pair = between.get(_pair(groups[a], groups[b]))
        found[a, b] = measured.get((b, a)) or pair or min(ends, default=middle)
    return found


def _middles(measured: dict[Way, float], groups: Sequence[int]) -> dict[Way, float]:
    """The median of each two regions, both ways."""
    found: dict[Way, list[float]] = {}
    for (a, b), rate in measured.items():
        found.setdefault(_pair(groups[a], groups[b]), []).append(rate)
    return {pair: statistics.median(rates) for pair, rates in found.items()}


def _middles_of_ends(measured: dict[Way, float]) -> dict[int, float]:
    """The median of the links of each member, both ways."""
    found: dict[int, list[float]] = {}
    for way, rate in measured.items():
        for end in way:
            found.setdefault(end, []).append(rate)
    return {end: statistics.median(rates) for end, rates in found.items()}


def _pair(one: int, other: int) -> Way:
    return min(one, other), max(one, other)
