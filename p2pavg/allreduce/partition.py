"""How large each member's part is: sized so that every member and every link ends at the same time.

Often many fractions are as good as the best, so the evenest mixture that is nearly as fast is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.minimax import Costs, minimax

F64 = npt.NDArray[np.float64]

ALIGNMENT = 1024  # elements; part borders fall on multiples, so that int8 blocks and cache lines are not torn
_SPARSE_BLOCK = 4096  # elements; a chunk of a sparse codec has whole ones
_NEARLY = 1.01  # rates are not known better
_WORTH = 0.05  # a part below this share of an equal one is not worth its overhead


def fractions(costs: Costs) -> tuple[F64, float]:
    """float64[columns]: the fraction of the vector for each column of `costs`; they add up to 1. And the
    largest sum of costs that they make.
    """
    found = even(costs, minimax(costs)) if costs.columns > 1 else np.ones(1)
    return found, float(costs.sums(found).max())


def even(costs: Costs, best: F64) -> F64:
    """Shares for the columns of `costs`, nearly as fast as the fastest, which are `best`."""
    now = costs.sums(best)
    limit = _NEARLY * float(now.max())
    # As much as each may own before it breaks a bound by itself, while the others do what costs least there.
    full, sparse = costs.least
    room = np.minimum(
        _room(limit, full[:, None], costs.full).min(axis=0, initial=1.0),
        _room(limit, sparse[costs.places], costs.entries).min(axis=1, initial=1.0),
    ).clip(0)
    even = room / room.sum() if room.sum() > 0 else best
    then = costs.sums(even)
    growing = then > limit
    mixed = float(((limit - now)[growing] / (then - now)[growing]).min(initial=1.0))
    found: F64 = (1 - mixed) * best + mixed * even
    found[found * len(found) < _WORTH] = 0.0
    found /= found.sum()
    return found


def _room(limit: float, least: F64, costs: F64) -> F64:
    """How much may be owned where the bound costs so much, and `least` elsewhere."""
    slope = costs - least
    found: F64 = np.divide(limit - least, slope, out=np.ones_like(slope), where=slope > 0)
    return found


def part_counts(numel: int, fractions: Sequence[float]) -> tuple[int, ...]:
    """Elements per member: fractions of numel, rounded to ALIGNMENT, exact in sum. Small vectors go to few
    owners.
    """
    counts: list[int] = []
    taken = 0
    cumulative = 0.0
    last = max((i for i, x in enumerate(fractions) if x > 0), default=0)
    for i, fraction in enumerate(fractions):
        cumulative += fraction
        end = numel if i >= last else min(numel, round(cumulative * numel / ALIGNMENT) * ALIGNMENT)
        end = max(end, taken)
        counts.append(end - taken)
        taken = end
    return tuple(counts)


def gathered_chunk_elements(count: int) -> int:
    """Elements per chunk of an all-gather: about 16 chunks a part, and few enough bytes beside each
    header.
    """
    aligned = -(-count // (16 * _SPARSE_BLOCK)) * _SPARSE_BLOCK
    return max(256 * 1024, min(1024 * 1024, aligned))


def chunk_elements(counts: Sequence[int]) -> int:
    """Elements per chunk: 128 Ki (512 KiB of float32) for long parts, shorter so that a part has about 64:
    several for each stream of a link, so that all streams end together and a lost one costs little. A link
    carries several parts where there are more than members of a flat group.
    """
    parts = min(32, max(1, sum(count > 0 for count in counts)))
    wanted = -(-sum(counts) // (64 * parts))
    aligned = -(-wanted // ALIGNMENT) * ALIGNMENT
    return max(4 * 1024, min(128 * 1024, aligned))
