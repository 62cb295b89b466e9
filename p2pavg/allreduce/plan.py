"""From the members of a group to the parts of the vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pavg.allreduce.partition import Capacity, part_counts, shares
from p2pavg.transport.engine import Part


def planner(numel: int) -> Callable[[Sequence[Capacity]], tuple[Part, ...]]:
    """A function from the members' capacities, in rank order, to one part per member that owns something."""

    def plan(members: Sequence[Capacity]) -> tuple[Part, ...]:
        parts: list[Part] = []
        start = 0
        for rank, count in enumerate(part_counts(numel, shares(members))):
            if count:
                parts.append(Part(rank, start, count))
                start += count
        return tuple(parts)

    return plan
