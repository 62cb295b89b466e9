"""How long each sender, receiver and link is busy, by the trees that a vector is reduced along. Pure.

Model. S is the encoded size of the vector, x_t the fraction that is reduced along tree t, u_i and d_i the up
and down rate of member i, r_ij the rate of the link from i to j. Along a tree each member sends one vector
to its parent, unless nothing that it has counts, and gets one back; two that swap send each other one.
So member i sends S * sum_t x_t * (what it sends along t), over u_i, and likewise for what it receives and for
what each link carries. The best x minimises the largest of (bytes / rate): `minimax` finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.minimax import Costs
from p2pavg.plan import Plan

F64 = npt.NDArray[np.float64]

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


@dataclass(frozen=True, slots=True)
class Known:
    """Rates in bytes/s, by rank, and from rank to rank; what is not known of a member is taken to be fast."""

    up: F64
    down: F64
    links: F64  # 0.0: not known


def link_rates(members: int, links: Mapping[tuple[int, int], float]) -> F64:
    """float64[members, members]: bytes/s from rank to rank; 0.0 where not known."""
    found = np.zeros((members, members))
    for pair, rate in links.items():
        found[pair] = rate
    return found


def measured(members: Sequence[Capacity], links: F64) -> Known | None:
    """The rates that a network can have; None: there are none. links: as `link_rates` makes them."""
    ups, downs = (
        np.array([rate or 0.0 for rate in known])
        for known in ([member.up for member in members], [member.down for member in members])
    )
    ups, downs, links = (np.where((x >= _LEAST) & (x <= _MOST), x, 0.0) for x in (ups, downs, links))
    np.fill_diagonal(links, 0.0)
    fast = _UNKNOWN * max(float(x.max()) for x in (ups, downs, links))
    if fast == 0:
        return None
    return Known(np.where(ups > 0, ups, fast), np.where(downs > 0, downs, fast), links)


def loads(trees: Plan, members: Sequence[Capacity], links: F64) -> Costs | None:
    """Seconds that each sender, each receiver and each link needs per byte of the vector, by the tree that is
    reduced along. None: nothing is known. trees: one for each part, whose counts do not matter.
    """
    known = measured(members, links)
    if known is None:
        return None
    n, count = len(members), len(trees.parts)
    ranks, tree = np.arange(n), np.arange(count)
    contributes = np.array([member.contributes for member in members])
    owner = np.array([part.owner for part in trees.parts])
    deputy = np.fromiter(itertools.chain.from_iterable(part.deputies for part in trees.parts), np.int64)
    parents = np.repeat(owner[:, None], n, axis=1)
    sends = np.repeat(contributes[None].astype(float), count, axis=0)
    returns = np.ones((count, n))
    if len(deputy):
        _, group = np.unique(trees.groups, return_inverse=True)
        inside = np.bincount(group, contributes)
        any_in, any_outside = inside > 0, inside < contributes.sum()
        at = np.repeat(tree, [len(part.deputies) for part in trees.parts])
        above = np.repeat(owner[:, None], len(any_in), axis=1)
        above[at, group[deputy]] = deputy
        parents = np.take(above, group, axis=1)
        parents[at, deputy] = owner[at]
        sends[at, deputy] = any_in[group[deputy]]
        swapped = np.array([part.swaps for part in trees.parts])[at]  # such a part has one deputy
        returns[at[swapped], deputy[swapped]] = any_outside[group[deputy[swapped]]]
    sends[tree, owner] = returns[tree, owner] = 0.0
    up = _summed(parents, returns) + sends
    down = _summed(parents, sends) + returns
    spent = np.divide(1.0, known.links, out=np.zeros_like(known.links), where=known.links > 0)
    return Costs(
        np.concatenate([up.T / known.up[:, None], down.T / known.down[:, None]]),
        np.concatenate([ranks * n + parents, parents * n + ranks], axis=1),
        np.concatenate([sends * spent[ranks, parents], returns * spent[parents, ranks]], axis=1),
        n * n,
    )


def _summed(parents: npt.NDArray[np.int64], amounts: F64) -> F64:
    """float64[trees, n]: of each tree the amounts of those that have each rank as their parent."""
    count, n = amounts.shape
    places = parents + n * np.arange(count)[:, None]
    found: F64 = np.bincount(places.ravel(), amounts.ravel(), count * n).astype(np.float64, copy=False)
    return found.reshape(count, n)
