"""Which members are near each other: by the regions that they name, else by round trips. Pure."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from p2pavg.report.distance import Where

NEAR_RTT_S = 0.010  # between data centres of one region it is below, between regions above


def regions(names: Sequence[str], rtts: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """The group of each member, by rank: members of one region share a number.

    names: by rank; "" where a peer names none. rtts: seconds between two ranks, in either order, where
    measured. Who names no region is with those that are near, and alone when nobody is known to be.
    """
    named = [region_of(name) for name in names]
    group = list(range(len(names)))
    first: dict[str, int] = {}
    for rank, name in enumerate(named):
        if name:
            group[rank] = first.setdefault(name, rank)
    near = [
        (rtt, one, other)
        for (one, other), rtt in rtts.items()
        if 0.0 < rtt <= NEAR_RTT_S and not (named[one] and named[other])
    ]
    for _, one, other in sorted(near):
        a, b = group[one], group[other]
        if a == b or (named[a] and named[b]):
            continue
        kept, gone = (a, b) if named[a] or (not named[b] and a < b) else (b, a)
        group = [kept if found == gone else found for found in group]
    return tuple(group)


def can_stack(names: Sequence[str]) -> bool:
    """Whether these members are known to be in several regions, one of them with several members. names: ""
    where a peer names none; it may be near any other.
    """
    members = Counter(region_of(name) for name in names if name)
    return len(members) > 1 and max(members.values()) > 1


@functools.lru_cache(maxsize=1024)
def region_of(name: str) -> str:
    """What two names have in common when their peers are in one region."""
    return Where.parse(name).region or name.strip().lower()
