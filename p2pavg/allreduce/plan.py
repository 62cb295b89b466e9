"""From the members of a group to the parts of the vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pavg.allreduce.partition import Capacity, part_counts, shares
from p2pavg.part import Part


def plan(numel: int, members: Sequence[Capacity], links: Mapping[tuple[int, int], float]) -> tuple[Part, ...]:
    """One part for each member that owns something. members: in rank order. links: bytes/s from rank to rank,
    where known.
    """
    parts: list[Part] = []
    start = 0
    for rank, count in enumerate(part_counts(numel, shares(members, links))):
        if count:
            parts.append(Part(rank, start, count))
            start += count
    return tuple(parts)
