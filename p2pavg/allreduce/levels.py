"""Plans with two levels: which trees there are over regions, and how much of the vector each gets. Pure.

Within a region its members take turns as the one that adds up: tree after tree another one does, so that
each machine, and each pair of machines of two regions, carries its share. Of two regions, both reduce: they
swap partial means, so that nothing waits for a way there and back.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

import numpy as np

from p2pavg.allreduce.minimax import Costs
from p2pavg.allreduce.partition import fractions, part_counts
from p2pavg.plan import Plan
from p2pavg.plan.part import Part

MOST_TREES = 128  # of one plan: each is a part with its own border, digest and last chunk


class Swaps(Enum):
    """Who may swap partial means with whom."""

    NOBODY = "nobody"  # two that encode the same values may get other bytes
    CROWDS = "crowds"  # regions of several members: a partial mean takes more bytes than a contribution
    ALL = "all"


def trees(
    groups: Sequence[int],
    owners: Collection[int],
    homes: Collection[int] | None = None,
    swaps: Swaps = Swaps.NOBODY,
) -> Plan | None:
    """A plan whose parts are all empty, one for each tree; None: two levels save nothing here.

    groups: by rank. owners: ranks that may reduce. homes: groups that may own parts, also where regions of
    one member each need no deputy; None: all.
    """
    return _trees(tuple(groups), tuple(owners), None if homes is None else frozenset(homes), swaps)


@functools.lru_cache(maxsize=16)
def _trees(
    groups: tuple[int, ...], owners: tuple[int, ...], homes: frozenset[int] | None, swaps: Swaps
) -> Plan | None:
    """The same. They do not depend on rates, and the same members mostly meet again."""
    here: dict[int, list[int]] = {}
    for rank in owners:
        here.setdefault(groups[rank], []).append(rank)
    sizes = Counter(groups)
    crowded = {group for group in here if sizes[group] > 1}
    home_groups = [group for group in here if homes is None or group in homes]
    if len(here) < 2 or not home_groups or (homes is None and not crowded):
        return None
    swapped = len(here) == 2 and (swaps is Swaps.ALL or (swaps is Swaps.CROWDS and len(crowded) == 2))
    if swapped:
        crowded, home_groups = set(here), home_groups[:1]
    turns = _turns(tuple(tuple(ranks) for ranks in here.values()), max(1, MOST_TREES // len(home_groups)))
    # Where a region has so many members that their turns alone are nearly all trees, homes take turns, too.
    each = max(1, min(len(home_groups), MOST_TREES // len(turns)))
    parts = []
    for at, turn in enumerate(turns):
        chosen = dict(zip(here, turn, strict=True))
        busy = [group for group in chosen if group in crowded]
        able = tuple([chosen[group] for group in busy])
        for home in (home_groups[(at * each + k) % len(home_groups)] for k in range(each)):
            own = busy.index(home) if home in crowded else len(busy)
            parts.append(Part(chosen[home], 0, 0, able[:own] + able[own + 1 :], swapped))
    return Plan(tuple(parts), groups)


def _turns(members: tuple[tuple[int, ...], ...], most: int) -> list[tuple[int, ...]]:
    """For each turn one member of each group: all members equally often, and all pairs as evenly as `most`
    turns allow.
    """
    largest = max(map(len, members))
    pairs = max((len(a) * len(b) for i, a in enumerate(members) for b in members[:i]), default=1)
    count = min(pairs if len(members) < 3 else 2 * pairs, max(largest, most))
    if len(members) == 2:
        one, other = members
        again = math.lcm(len(one), len(other))
        return [(one[k % len(one)], other[(k + k // again) % len(other)]) for k in range(count)]
    ends = list(itertools.accumulate(map(len, members), initial=0))
    last = max((at for at, group in enumerate(members) if len(group) > 1), default=0)
    everybody = [rank for group in members for rank in group]
    together = np.zeros((ends[-1], ends[-1]), np.int64)
    used = np.arange(ends[-1])  # how often, times the number of members, and then who is first
    found = []
    for _ in range(count):
        best: list[int] = []
        cost = used.copy()
        for at, (start, end) in enumerate(itertools.pairwise(ends)):
            best.append(start if end - start == 1 else start + int(cost[start:end].argmin()))
            if at < last:  # after it there is nothing to choose
                cost += together[best[-1]]
        chosen = np.array(best)
        together[chosen[:, None], chosen] += 2 * count * ends[-1]  # counts more than any number of uses
        used[chosen] += ends[-1]
        found.append(tuple(everybody[at] for at in best))
    return found


def sized(plan: Plan, numel: int, costs: Costs | None) -> tuple[Plan, float | None]:
    """The plan with parts that cover `numel` values so that all bounds end together, and seconds per byte of
    the vector; None: not known.
    """
    shares, seconds = (None, None) if costs is None else fractions(costs)
    if shares is None:
        shares = np.full(len(plan.parts), 1 / len(plan.parts))
    parts: list[Part] = []
    start = 0
    for tree, count in zip(plan.parts, part_counts(numel, shares.tolist()), strict=True):
        if count:
            parts.append(Part(tree.owner, start, count, tree.deputies, tree.swaps))
            start += count
    return Plan(tuple(parts), plan.groups), seconds
