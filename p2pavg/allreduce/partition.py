"""How large each member's part is: sized so that every member and every link ends at the same time.

Model of a flat butterfly. S is the encoded size of the vector, x_i the fraction that member i owns, u_i and
d_i its up and down rate, r_ij the rate of the link from i to j. Member i sends a contribution for what it
does not own and returns its own part to everybody else, so it sends S*(c_i*(1 - x_i) + (N - 1)*x_i) and
receives S*((C - c_i)*x_i + 1 - x_i), where c_i is 1 when it contributes and C counts the contributors. The
link from i to j carries S*(c_i*x_j + x_i). The best x minimises the largest of (bytes / rate).

As the fractions add up to 1, every time is a sum of costs times fractions: `minimax` finds the best ones.
Often many are as good, so the evenest mixture that is nearly as fast is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.minimax import minimax

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

ALIGNMENT = 1024  # elements; part borders fall on multiples, so that int8 blocks and cache lines are not torn
_SPARSE_BLOCK = 4096  # elements; a chunk of a sparse codec has whole ones
_NEARLY = 1.01  # rates are not known better
_WORTH = 0.05  # a part below this share of an equal one is not worth its overhead
_LEAST = 1.0  # bytes/s: less is no measurement
_MOST = 1e15  # and more is none either
_UNKNOWN = 10.0  # what has not been measured is taken to be that much faster than the fastest that has


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a member can move. Rates in bytes/s; None: not known yet, taken to be no limit."""

    up: float | None = None
    down: float | None = None
    owns: bool = True  # False: cannot accept connections, joins only, or too slow
    contributes: bool = True


def shares(
    members: Sequence[Capacity], links: Mapping[tuple[int, int], float] | None = None
) -> tuple[float, ...]:
    """Fraction of the vector for each member; sums to 1. links: bytes/s from member i to member j, where
    known.

    Raises ValueError when nobody may own a part.
    """
    owners = [i for i, member in enumerate(members) if member.owns]
    if not owners:
        raise ValueError("no member of the group can own a part")
    found_costs = costs(members, links or {}) if len(owners) > 1 else None
    found = np.zeros(len(members))
    if found_costs is None:
        found[owners] = 1 / len(owners)
    else:
        found[owners] = even(found_costs[:, owners], minimax(found_costs[:, owners]))
    return tuple(float(x) for x in found)


def costs(members: Sequence[Capacity], links: Mapping[tuple[int, int], float]) -> F64 | None:
    """float64[bounds, members]: seconds that each sender, receiver and link needs per byte of the vector, by
    whose it is. None: nothing is known.
    """
    n, known = len(members), measured(members, links)
    if known is None:
        return None
    contributes = np.array([float(m.contributes) for m in members])
    sent, received = np.repeat(contributes[:, None], n, axis=1), np.ones((n, n))
    np.fill_diagonal(sent, n - 1)
    np.fill_diagonal(received, contributes.sum() - contributes)
    ends, rates = known.ends()
    carried, row = np.zeros((len(rates), n)), np.arange(len(rates))
    carried[row, ends[:, 0]] = 1 / rates
    carried[row, ends[:, 1]] = contributes[ends[:, 0]] / rates
    found: F64 = np.concatenate([sent / known.up[:, None], received / known.down[:, None], carried])
    return found


@dataclass(frozen=True, slots=True)
class Known:
    """Rates in bytes/s, by rank and by ordered pair of ranks; what is not known is taken to be fast."""

    up: F64
    down: F64
    pairs: Mapping[tuple[int, int], float]

    def ends(self) -> tuple[I64, F64]:
        """int64[pairs, 2] and float64[pairs]: from and to which rank each pair leads, and its rate."""
        ends = np.array(list(self.pairs), np.int64).reshape(-1, 2)
        return ends, np.fromiter(self.pairs.values(), np.float64, len(self.pairs))


def measured(members: Sequence[Capacity], links: Mapping[tuple[int, int], float]) -> Known | None:
    """The rates that a network can have; None: there are none."""
    pairs = {pair: rate for pair, rate in links.items() if _LEAST <= rate <= _MOST and pair[0] != pair[1]}
    ups, downs = [_possible(m.up) for m in members], [_possible(m.down) for m in members]
    known = [rate for rate in (*pairs.values(), *ups, *downs) if rate is not None]
    if not known:
        return None
    fast = _UNKNOWN * max(known)
    return Known(np.array([rate or fast for rate in ups]), np.array([rate or fast for rate in downs]), pairs)


def _possible(rate: float | None) -> float | None:
    """None: not known, or no rate that a network can have."""
    return rate if rate is not None and _LEAST <= rate <= _MOST else None


def slowest_first(costs: F64) -> F64:
    """The bounds that can bind: one whose every column costs less than another's cheapest never does."""
    floor = costs.min(axis=1).max()
    binding: F64 = costs[costs.max(axis=1) > floor]
    return binding if len(binding) else costs[[costs.max(axis=1).argmax()]]


def even(costs: F64, best: F64) -> F64:
    """Shares for the columns of `costs`, nearly as fast as the fastest, which are `best`."""
    limit = _NEARLY * float((costs @ best).max())
    # As much as each may own before it breaks a bound by itself, while the others do what costs least there.
    least = costs.min(axis=1, keepdims=True)
    slope = costs - least
    room = np.where(slope > 0, (limit - least) / np.where(slope > 0, slope, 1), 1).min(axis=0).clip(0, 1)
    even = room / room.sum() if room.sum() > 0 else best
    now, then = costs @ best, costs @ even
    growing = then > limit
    mixed = float(((limit - now)[growing] / (then - now)[growing]).min(initial=1.0))
    found: F64 = (1 - mixed) * best + mixed * even
    found[found * len(found) < _WORTH] = 0.0
    found /= found.sum()
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
