"""The choice of machines to rent: counts of each offer that give most for the money. Pure.

Swarms are chosen from a pool that follows from what is on offer alone: all, where they are few, else the best
for every budget by the bounds, and what is around these. Of the pool the best is found for certain (branch
and bound: to judge a swarm by the laws takes milliseconds, to bound it microseconds). So more money never
gives less, and no order of the offers changes anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from p2pavg.forecast.bounds import F64, Bools, Bounds, Counts, Estimates
from p2pavg.forecast.inventory import Inventory, MachineOffer
from p2pavg.forecast.laws import Overheads, PeerProfile, Swarm, dollars_per_hour, epoch
from p2pavg.plan import MOST_FLAT

EXHAUSTIVE = 20_000
KEEP = 1.05  # the plan at hand is left for another that is better by more than this factor
_TURNS, _LOOKED_AROUND = 6, 12  # how often a pool is made larger, around how many of its best swarms
_OF_EACH, _STEPS, _NEAR = 2, 4, 150  # of what may replace the plan at hand: how much is looked at
_WORK, _FEW = 4 * MOST_FLAT**2, 12  # and judged, by the squares of peers; fewer peers take as long as so few
_RESERVES = (1.0, 1.1)  # times the samples/s of the goal: estimates are bounds, and few swarms reach theirs
_REPAIRS = (0.5, 1.0, 1.5, 2.0, 3.0)  # times the peers of one offer that a plan lacks by calculation
_MENDED = 3  # swarms that miss the goal, of which repairs are looked at
_ESTIMATED = 4  # of the work of judging: an estimate
_FRONT = 0.9  # of a plan's dollars: what the next cheaper one of the front may cost


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """So many of each offer, and what the laws make of them. Nobody at all has a speed of 0."""

    counts: tuple[int, ...]
    sps: float
    dollars_hour: float


@dataclass(frozen=True, slots=True)
class Goal:
    """Most samples/s, or the `cheapest`: at most so many dollars an hour, and at least so many samples/s."""

    cheapest: bool = False
    dollars_hour: float = math.inf
    sps: float = 0.0

    def met(self, plan: MachinePlan) -> bool:
        return 0 < plan.sps >= self.sps and plan.dollars_hour <= self.dollars_hour

    def value(self, plan: MachinePlan) -> float:
        """The larger, the better."""
        return -plan.dollars_hour if self.cheapest else plan.sps

    def likely(self, sps: F64, dollars: F64) -> F64:
        """The values of swarms of about so much, less what they are beyond the limits."""
        beyond = np.maximum(1.0, np.maximum(dollars, 1e-9) / max(self.dollars_hour, 1e-9))
        short = np.maximum(1.0, self.sps / np.maximum(sps, 1e-9))
        found: F64 = -dollars * short**4 if self.cheapest else sps / beyond**2
        return found

    def worth(self, now: MachinePlan, other: MachinePlan) -> bool:
        """Whether to leave the plan at hand."""
        if self.cheapest:
            return KEEP * other.dollars_hour < now.dollars_hour
        return other.sps > KEEP * now.sps

    def open(self, pool: Estimates, known: MachinePlan | None) -> Bools:
        """Which swarms may meet the goal, and be better than the known plan."""
        if known is None:
            return (pool.sps >= self.sps) & (pool.dollars(self.sps) <= self.dollars_hour)
        if self.cheapest:
            return (pool.sps >= self.sps) & (pool.dollars(self.sps) < known.dollars_hour)
        return (pool.sps > known.sps) & (pool.dollars(known.sps) <= self.dollars_hour)


class Judge:
    """Judges swarms from one inventory. Of an offer that does not hold the model there is none."""

    def __init__(self, inventory: Inventory, overheads: Overheads | None = None) -> None:
        self.inventory = inventory
        self.overheads = overheads or Overheads()
        counts = [min(offer.count, MOST_FLAT) * offer.fits for offer in inventory.offers]
        self.limits = np.array(counts, dtype=np.int64)
        self.whole = float(np.prod(self.limits + 1.0)) <= EXHAUSTIVE
        regions = sorted({offer.region for offer in inventory.offers})
        self.places = np.array([[offer.region == one for one in regions] for offer in inventory.offers], int)
        self.before: Estimates | None = None  # the pool of an offer that was larger
        self.bounds = Bounds(inventory, self.overheads)
        self._known: dict[tuple[int, ...], MachinePlan] = {}

    def within(self, most: Sequence[int] | Counts) -> Judge:
        """A judge of what is left with no more than so many of each offer, who knows what this one knows."""
        there = copy(self)
        there.before = self.pool
        there.limits = np.minimum(most, self.limits)
        there.__dict__.pop("pool", None)
        return there

    @cached_property
    def pool(self) -> Estimates:
        """The swarms that plans are chosen from."""
        if self.whole and self.before is not None:
            return self.before.only(np.all(self.before.swarms <= self.limits, axis=1))
        if self.whole:
            ways = itertools.product(*(range(limit + 1) for limit in self.limits))
            return self.estimated(np.array(list(ways), dtype=np.int64))
        found = self.estimated(np.concatenate(beginnings(self.inventory.offers, self.limits))).front()
        looked: set[bytes] = set()
        for _ in range(_TURNS):
            fresh = found.only(np.array([counts.tobytes() not in looked for counts in found.swarms], bool))
            if not len(fresh.swarms):
                break
            scale = np.log(np.maximum(fresh.about, 1e-9))
            evenly = [np.abs(scale - at).argmin() for at in np.linspace(scale[0], scale[-1], _LOOKED_AROUND)]
            some = fresh.swarms[np.unique(evenly)]
            looked |= {counts.tobytes() for counts in some}
            near = np.concatenate([around(counts, self.limits) for counts in some])
            cheaper = np.searchsorted(found.about, near @ self.bounds.rent, side="right")
            fastest = np.maximum.accumulate(np.concatenate([[0.0], found.sps]))
            near = near[near @ self.bounds.sps > fastest[cheaper]]  # others are slower or dearer for certain
            found = found.beside(self.estimated(near)).front()
        return found

    def estimated(self, swarms: Counts) -> Estimates:
        """Those of one peer up to as many as are tested, each once."""
        swarms = swarms[(swarms.sum(1) > 0) & (swarms.sum(1) <= MOST_FLAT)]
        return self.bounds.of(np.unique(swarms, axis=0))

    def roughly(self, goal: Goal, swarms: Counts) -> npt.NDArray[np.int64]:
        """Their indices, the likeliest first by calculation and rent alone."""
        likely = goal.likely(swarms @ self.bounds.sps, swarms @ self.bounds.rent)
        return np.argsort(-likely, kind="stable")

    def plan(self, counts: Sequence[int] | Counts) -> MachinePlan:
        """One swarm, judged by the laws."""
        key = tuple(int(count) for count in counts)
        if key not in self._known:
            self._known[key] = self._judged(key) if any(key) else MachinePlan(key, 0.0, 0.0)
        return self._known[key]

    def _judged(self, counts: tuple[int, ...]) -> MachinePlan:
        swarm = self.swarm(counts)
        found = epoch(self.inventory.job, swarm, self.overheads)
        rent, traffic = dollars_per_hour(found, swarm, self.inventory.per_gb)
        return MachinePlan(counts, found.samples_per_second, rent + traffic)

    def swarm(self, counts: Sequence[int]) -> Swarm:
        """Its peers and links, for `laws.epoch`."""
        offers = self.inventory.offers
        kinds = [offer for offer, count in zip(offers, counts, strict=True) for _ in range(count)]
        members = [
            PeerProfile(f"{one.name}#{n}", one.region, one.sps, one.up, one.down, one.dollars_hour)
            for n, one in enumerate(kinds, 1)
        ]
        links = {
            (a, b): self.inventory.links[members[a].region, members[b].region]
            for a, b in itertools.permutations(range(len(members)), 2)
        }
        return Swarm(members, links)


def search(judge: Judge, goal: Goal, begin: Sequence[int] | None = None) -> MachinePlan | None:
    """The best swarm of the pool; None: none meets the goal.

    begin: the plan at hand, kept unless another is better by `KEEP`: of what is left of an earlier pool, and
    of what a few steps around the best of these reach. A few of these are judged, so None may be wrong then.
    """
    if begin is None:
        return _best(judge, goal, judge.pool)
    now = judge.plan(np.minimum(begin, judge.limits))
    held = now if goal.met(now) else None
    pool = judge.pool if judge.whole else _left(judge, goal, now)
    best = _best(judge, goal, pool, held, _WORK, 0 if judge.whole else _MENDED)
    return best if held is None or (best is not None and goal.worth(now, best)) else now


def next_best(judge: Judge, goal: Goal, plan: MachinePlan) -> MachinePlan | None:
    """The best other swarm of the pool. None: none meets the goal."""
    return _best(judge, goal, judge.pool.only(np.any(judge.pool.swarms != plan.counts, axis=1)))


def front(judge: Judge) -> list[MachinePlan]:
    """Plans of which none has both more samples/s and fewer dollars: the way from cheap to fast."""
    found: list[MachinePlan] = []
    plan = search(judge, Goal())
    while plan is not None and (not found or plan.dollars_hour < found[-1].dollars_hour):
        found.append(_best(judge, Goal(cheapest=True, sps=plan.sps), judge.pool, plan) or plan)
        plan = search(judge, Goal(dollars_hour=_FRONT * found[-1].dollars_hour))
    return found[::-1]


def _best(
    judge: Judge,
    goal: Goal,
    pool: Estimates,
    known: MachinePlan | None = None,
    most: float = math.inf,
    mended: int = 0,
) -> MachinePlan | None:
    """The best of `known` and the pool. The likeliest are judged, until no other may be better, or so much
    work was done, twice as much where none met the goal yet. How far off the estimates of one were, those of
    others in the same regions are expected to be. Of the first few that miss the goal, `mended`, repairs come
    to the pool.
    """
    work, pool = 0.0, pool.only(goal.open(pool, known))
    sps, dollars, places = pool.sps, pool.about, pool.swarms @ judge.places > 0
    while len(sps) and work < (most if known else 2 * most):
        at = goal.likely(sps, dollars).argmax()
        plan = judge.plan(pool.swarms[at])
        work += max(_FEW, sum(plan.counts)) ** 2
        if goal.met(plan) and (known is None or goal.value(plan) > goal.value(known)):
            known = plan
        elif mended and not goal.met(plan):
            mended -= 1
            more = judge.estimated(repairs(judge, goal, plan))
            work += _ESTIMATED * len(more.sps)
            pool = pool.beside(more)
            sps, dollars = np.concatenate([sps, more.sps]), np.concatenate([dollars, more.about])
            places = np.concatenate([places, more.swarms @ judge.places > 0])
        alike = (places == places[at]).all(1)
        sps = np.where(alike, pool.sps * (plan.sps / pool.sps[at]), sps)
        dollars = np.where(alike, pool.about * (plan.dollars_hour / max(pool.about[at], 1e-9)), dollars)
        may = goal.open(pool, known)
        may[at] = False
        pool, sps, dollars, places = pool.only(may), sps[may], dollars[may], places[may]
    return known


def _left(judge: Judge, goal: Goal, now: MachinePlan) -> Estimates:
    """What is left of an earlier pool, repairs of the plan at hand, the likeliest of each beginning, and what
    a few steps around the likeliest of these reach that meet the goal.
    """
    earlier = judge.pool if judge.before is None else judge.before
    new = [
        way[judge.roughly(goal, way)[:_OF_EACH]] for way in beginnings(judge.inventory.offers, judge.limits)
    ]
    new += [np.array([now.counts]), repairs(judge, goal, now)]
    found = judge.estimated(np.minimum(np.concatenate([earlier.swarms, *new]), judge.limits))
    looked: set[bytes] = set()
    for step in range(_STEPS):
        # Swarms that miss the goal may be the likeliest for being cheap, and all around them misses it, too.
        share = _RESERVES[step % len(_RESERVES)]
        safe = replace(goal, sps=goal.sps * share, dollars_hour=goal.dollars_hour / share)
        meets = (found.sps >= safe.sps) & (found.about <= safe.dollars_hour)
        there = found.only(meets) if meets.any() else found
        if not len(there.swarms):
            break
        at = there.swarms[safe.likely(there.sps, there.about).argmax()]
        if at.tobytes() in looked:
            continue
        looked.add(at.tobytes())
        near = around(at, judge.limits)
        found = found.beside(judge.estimated(near[judge.roughly(goal, near)[:_NEAR]]))
    return found


def repairs(judge: Judge, goal: Goal, plan: MachinePlan) -> Counts:
    """Swarms with more peers of one offer: about as many as the goal lacks, or as it lets one pay."""
    sps, rent = judge.bounds.sps, np.maximum(judge.bounds.rent, 1e-9)
    lacking = (goal.sps - plan.sps) / sps if goal.cheapest else (goal.dollars_hour - plan.dollars_hour) / rent
    number = np.ceil(np.clip(np.outer(_REPAIRS, lacking), 1, MOST_FLAT)).astype(np.int64)
    more = number[:, :, None] * np.eye(len(sps), dtype=np.int64)
    found: Counts = np.minimum(np.array(plan.counts) + more.reshape(-1, len(sps)), judge.limits)
    return found


def around(counts: Sequence[int] | Counts, limits: Counts) -> Counts:
    """Swarms that differ by one or all peers of an offer, or of one offer against another."""
    eye = np.eye(len(limits), dtype=np.int64)
    present = eye[np.array(counts) > 0]
    more, less = (np.concatenate([0 * eye[:1], some, MOST_FLAT * some]) for some in (eye, present))
    found: Counts = np.clip(np.array(counts) + (more[:, None] - less).reshape(-1, len(limits)), 0, limits)
    return found


def beginnings(offers: Sequence[MachineOffer], limits: Counts) -> list[Counts]:
    """Peers of each offer alone, one of each with some of another, and of all regions, of each one, two and
    three: their offers, added one by one, the fastest or the cheapest speed first.
    """
    eye = np.eye(len(limits), dtype=np.int64)
    speed = np.array([offer.sps for offer in offers])
    value = speed / np.array([max(offer.dollars_hour, 1e-9) for offer in offers])
    regions = sorted({offer.region for offer in offers})
    ways = [np.array([at]) for at in range(len(offers))]
    for size in sorted({1, 2, 3, len(regions)}):
        for chosen in itertools.combinations(regions, size):
            inside = np.flatnonzero([offer.region in chosen for offer in offers])
            ways += [inside[np.argsort(-worth[inside], kind="stable")] for worth in (speed, value)]
    found = [np.cumsum(eye[np.repeat(way, limits[way])[:MOST_FLAT]], axis=0) for way in ways]
    return found + [np.minimum(eye + n * other, limits) for n in (1, 3, 9) for other in eye]
