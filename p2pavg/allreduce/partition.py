"""How large each member's part is: sized so that every member and every link ends at the same time.

Model of a flat butterfly. S is the encoded size of the vector, x_i the fraction that member i owns, u_i and
d_i its
up and down rate, r_ij the rate of the link from i to j. Member i sends a contribution for what it does not
own and returns its
own part to everybody else, so it sends S*(c_i*(1 - x_i) + (N - 1)*x_i) and receives S*((C - c_i)*x_i + 1 -
x_i), where
c_i is 1 when it contributes and C counts the contributors. The link from i to j carries S*(c_i*x_j + x_i).
The best x minimises the largest of (bytes / rate): a linear program, solved by bisection on the time and,
for each
time, by coordinate water-filling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 1024  # elements; part borders fall on multiples, so that int8 blocks and cache lines are not torn
_BISECTIONS = 40
_SWEEPS = 60


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a member can move. Rates in bytes/s; None: not known yet, taken as the best known rate."""

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
    if len(owners) == 1:
        return tuple(1.0 if i == owners[0] else 0.0 for i in range(len(members)))
    known = [rate for m in members for rate in (m.up, m.down) if rate]
    if not known and not links:
        return tuple(1.0 / len(owners) if m.owns else 0.0 for m in members)
    model = _Model(members, links or {}, max(known or list((links or {}).values())))
    low, high = 0.0, model.time(_equal(members, len(owners)))
    best = _equal(members, len(owners))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        filled = model.fill(middle)
        if sum(filled) >= 1.0:
            best, high = filled, middle
        else:
            low = middle
        if high - low <= 1e-4 * high:
            break
    total = sum(best)
    return tuple(x / total for x in best)


def _equal(members: Sequence[Capacity], owners: int) -> list[float]:
    return [1.0 / owners if m.owns else 0.0 for m in members]


class _Model:
    """The linear program in units of S: times are seconds per vector byte."""

    def __init__(
        self, members: Sequence[Capacity], links: Mapping[tuple[int, int], float], best: float
    ) -> None:
        self.n = len(members)
        self.members = members
        self.up = [m.up or best for m in members]
        self.down = [m.down or best for m in members]
        self.contributes = [1.0 if m.contributes else 0.0 for m in members]
        self.contributors = sum(self.contributes)
        self.links = {pair: rate for pair, rate in links.items() if rate > 0 and pair[0] != pair[1]}

    def time(self, x: Sequence[float]) -> float:
        """The slowest member's or link's time for the shares x."""
        worst = 0.0
        for i in range(self.n):
            c = self.contributes[i]
            sent = c * (1 - x[i]) + (self.n - 1) * x[i]
            received = (self.contributors - c) * x[i] + 1 - x[i]
            worst = max(worst, sent / self.up[i], received / self.down[i])
        for (i, j), rate in self.links.items():
            worst = max(worst, (self.contributes[i] * x[j] + x[i]) / rate)
        return worst

    def fill(self, time: float) -> list[float]:
        """Shares that keep every bound at `time` and are as large together as sweeps find; zeros when it is
        impossible.
        """
        bounds: list[float] = []
        for i, member in enumerate(self.members):
            c = self.contributes[i]
            bound = 1.0 if member.owns else 0.0
            for moved_at_zero, slope, rate in (
                (c, self.n - 1 - c, self.up[i]),
                (1.0, self.contributors - c - 1, self.down[i]),
            ):
                room = time * rate - moved_at_zero
                if slope > 0:
                    bound = min(bound, room / slope)
                elif room < slope:  # even owning everything it moves too much
                    return [0.0] * self.n
            bounds.append(bound)
        if min(bounds) < 0:
            return [0.0] * self.n
        if not self.links:
            return bounds
        return self._fill_links(bounds, time)

    def _fill_links(self, bounds: list[float], time: float) -> list[float]:
        """Shrink the bounds until every link holds, taking from both ends of a violated link."""
        x = list(bounds)
        for _ in range(_SWEEPS):
            worst = 0.0
            for (i, j), rate in self.links.items():
                c = self.contributes[i]
                excess = c * x[j] + x[i] - time * rate
                if excess > 1e-9:
                    worst = max(worst, excess)
                    both = x[i] + c * x[j]
                    x[i] -= excess * x[i] / both
                    x[j] -= excess * x[j] / both if c else 0.0
            if worst <= 1e-9:
                break
        return x


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


def chunk_elements(counts: Sequence[int]) -> int:
    """Elements per chunk: 128 Ki (512 KiB of float32) for long parts, shorter so that a part has about 8
    chunks to overlap.
    """
    longest = max(counts, default=0)
    wanted = -(-longest // 8)
    aligned = -(-wanted // ALIGNMENT) * ALIGNMENT
    return max(16 * 1024, min(128 * 1024, aligned))
