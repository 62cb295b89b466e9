"""Plans with two levels: which trees there are over regions, and how much of the vector each gets. Pure.

Within a region its members take turns as the one that adds up: tree after tree another one does, so that
each machine, and each pair of machines of two regions, carries its share. Of two regions, both reduce: they
swap partial means, so that nothing waits for a way there and back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.minimax import minimax
from p2pavg.allreduce.partition import Capacity, even, measured, part_counts, slowest_first
from p2pavg.plan import Plan
from p2pavg.plan.part import Part

F64 = npt.NDArray[np.float64]

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
    here: dict[int, list[int]] = {}
    for rank in owners:
        here.setdefault(groups[rank], []).append(rank)
    crowded = {group for group in here if sum(other == group for other in groups) > 1}
    home_groups = [group for group in here if homes is None or group in homes]
    if len(here) < 2 or not home_groups or (homes is None and not crowded):
        return None
    swapped = len(here) == 2 and (swaps is Swaps.ALL or (swaps is Swaps.CROWDS and len(crowded) == 2))
    if swapped:
        crowded, home_groups = set(here), home_groups[:1]
    turns = _turns([here[group] for group in here], max(1, MOST_TREES // len(home_groups)))
    parts = []
    for turn in turns:
        chosen = dict(zip(here, turn, strict=True))
        for home in home_groups:
            deputies = tuple(rank for group, rank in chosen.items() if group != home and group in crowded)
            parts.append(Part(chosen[home], 0, 0, deputies, swapped))
    return Plan(tuple(parts), tuple(groups))


def _turns(members: Sequence[Sequence[int]], most: int) -> list[tuple[int, ...]]:
    """For each turn one member of each group: all members equally often, and all pairs as evenly as `most`
    turns allow.
    """
    largest = max(map(len, members))
    pairs = max((len(a) * len(b) for i, a in enumerate(members) for b in members[:i]), default=1)
    count = min(pairs if len(members) < 3 else 2 * pairs, max(largest, most))
    used: dict[int, int] = {}
    together: dict[tuple[int, int], int] = {}
    found = []
    for _ in range(count):
        chosen: list[int] = []
        for group in members:
            best = min(
                group,
                key=lambda rank: (
                    sum(together.get((other, rank), 0) for other in chosen),
                    used.get(rank, 0),
                    rank,
                ),
            )
            for other in chosen:
                together[other, best] = together.get((other, best), 0) + 1
            chosen.append(best)
            used[best] = used.get(best, 0) + 1
        found.append(tuple(chosen))
    return found


def tree_costs(plan: Plan, members: Sequence[Capacity], links: Mapping[tuple[int, int], float]) -> F64 | None:
    """float64[bounds, trees]: seconds that each sender, receiver and link needs per byte of the vector, by
    the tree that is reduced along. None: nothing is known. As `partition.costs`, which has flat trees only.
    """
    known = measured(members, links)
    if known is None:
        return None
    n = len(members)
    carried = np.zeros((len(plan.parts), n, n))  # of each tree, from rank to rank, in vectors
    groups = np.array(plan.groups)
    contributes = np.array([member.contributes for member in members])
    ranks = np.arange(n)
    for index, part in enumerate(plan.parts):
        parents = np.full(n, part.owner)
        sends = contributes.copy()
        for deputy in part.deputies:
            below = groups == groups[deputy]
            sends[deputy] = contributes[below].any()
            parents[below] = deputy
        parents[list(part.deputies)] = part.owner
        returns = np.ones(n)
        if part.swaps:
            returns[part.deputies[0]] = contributes[groups != groups[part.deputies[0]]].any()
        sends[part.owner] = False
        others = ranks != part.owner
        carried[index, ranks[others], parents[others]] = sends[others]
        carried[index, parents[others], ranks[others]] += returns[others]
    rows = [carried.sum(2).T / known.up[:, None], carried.sum(1).T / known.down[:, None]]
    ends, rates = known.ends()
    rows.append(carried[:, ends[:, 0], ends[:, 1]].T / rates[:, None])
    found: F64 = np.concatenate(rows)
    return found


def sized(plan: Plan, numel: int, costs: F64 | None) -> tuple[Plan, float | None]:
    """The plan with parts that cover `numel` values so that all bounds end together, and seconds per byte of
    the vector; None: not known.
    """
    if costs is None:
        fractions = np.full(len(plan.parts), 1 / len(plan.parts))
        seconds = None
    else:
        binding = slowest_first(costs)
        fractions = even(binding, minimax(binding))
        seconds = float((costs @ fractions).max())
    parts: list[Part] = []
    start = 0
    for tree, count in zip(plan.parts, part_counts(numel, fractions.tolist()), strict=True):
        if count:
            parts.append(replace(tree, start=start, count=count))
            start += count
    return Plan(tuple(parts), plan.groups), seconds
