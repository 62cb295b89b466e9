"""The choice of machines to rent: counts of each offer that give most for the money. Pure.

Swarms are judged by the laws, by the plan that a leader would choose. That takes milliseconds, so `Bounds`
says of thousands of swarms at once what none can exceed, and only those are judged that may be the best:
with up to `EXHAUSTIVE` swarms, the best of all is found for certain (branch and bound). With more, peers are
added, removed and exchanged from several beginnings until nothing is better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pavg.forecast.bounds import F64, Bounds, Counts
from p2pavg.forecast.inventory import Inventory
from p2pavg.forecast.laws import Overheads, PeerProfile, Swarm, dollars_per_hour, epoch
from p2pavg.plan import MOST_FLAT

EXHAUSTIVE = 20_000
KEEP = 1.05  # the plan at hand is left for another that is better by more than this factor
_AT_ONCE = 10_000
_STARTS, _BEGINNINGS = 12, 4  # that are judged, and of these that are climbed from
_TRIES = 10  # swarms of those around another that are judged, the likeliest first
_FEW_OFFERS = 8
_LITTLE = 1.005  # by which a plan is to be better than the best
_FRONT, _FRONT_OF_MANY = 0.9, 0.5  # of a plan's dollars: what the next cheaper one of the front may cost


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

    def worth(self, now: MachinePlan, other: MachinePlan) -> bool:
        """Whether to leave the plan at hand."""
        if self.cheapest:
            return KEEP * other.dollars_hour < now.dollars_hour
        return other.sps > KEEP * now.sps


class Candidates(NamedTuple):
    """Swarms: int64[swarms, offers], and float64[swarms] of each: samples/s at most, dollars an hour at
    least, and dollars about.
    """

    swarms: Counts
    sps: F64
    least: F64
    about: F64

    def promising(self, goal: Goal, known: MachinePlan | None = None) -> npt.NDArray[np.int64]:
        """Those that may meet the goal, and be better than the known plan."""
        may = (self.sps > 0) & (self.sps >= goal.sps) & (self.least <= goal.dollars_hour)
        if known is not None:
            may &= self.at_most(goal) > goal.value(known)
        return np.flatnonzero(may)

    def at_most(self, goal: Goal) -> F64:
        """The value that each may have."""
        return -self.least if goal.cheapest else self.sps

    def likely(self, goal: Goal) -> F64:
        """The value that each has about, less what it is beyond the budget."""
        if goal.cheapest:
            return -self.about
        found: F64 = self.sps * np.minimum(1.0, goal.dollars_hour / np.maximum(self.about, 1e-9)) ** 2
        return found


class Judge:
    """Judges swarms from one inventory. most: of each offer; None: what the inventory says. Of an offer that
    does not hold the model there is none.
    """

    def __init__(
        self, inventory: Inventory, overheads: Overheads | None = None, most: Sequence[int] | None = None
    ) -> None:
        self.inventory = inventory
        self.overheads = overheads or Overheads()
        self._bounds = Bounds(inventory, self.overheads)
        offers = inventory.offers
        there = [offer.count for offer in offers] if most is None else most
        fits = [offer.fits for offer in offers]
        self.limits = np.minimum(there, MOST_FLAT).astype(np.int64) * np.array(fits)
        self.whole = float(np.prod(self.limits + 1.0)) <= EXHAUSTIVE
        self._known: dict[tuple[int, ...], MachinePlan] = {}

    def candidates(self, swarms: Counts) -> Candidates:
        """Swarms of one peer up to as many as are tested, with their bounds."""
        swarms = swarms[(swarms.sum(1) > 0) & (swarms.sum(1) <= MOST_FLAT)]
        told = [self._bounds.of(some) for some in np.array_split(swarms, 1 + len(swarms) // _AT_ONCE)]
        return Candidates(swarms, *(np.concatenate(column) for column in zip(*told, strict=True)))

    @cached_property
    def begun(self) -> Candidates:
        """Every swarm, where there are few, else those from which a search begins."""
        if self.whole:
            ways = itertools.product(*(range(limit + 1) for limit in self.limits))
            return self.candidates(np.array(list(ways), dtype=np.int64))
        return self.candidates(_beginnings(self.inventory, self.limits))

    def plan(self, counts: Sequence[int]) -> MachinePlan:
        """One swarm, judged by the laws."""
        key = tuple(int(count) for count in counts)
        if key not in self._known:
            self._known[key] = MachinePlan(key, 0.0, 0.0) if not any(key) else self._judged(key)
        return self._known[key]

    def _judged(self, counts: tuple[int, ...]) -> MachinePlan:
        swarm = self.swarm(counts)
        found = epoch(self.inventory.job, swarm, self.overheads)
        rent, traffic = dollars_per_hour(found, swarm.members, self.inventory.per_gb)
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
    """The best swarm found; None: none meets the goal.

    begin: the plan at hand, kept unless another is better by `KEEP`.
    """
    now = None if begin is None else judge.plan(np.minimum(begin, judge.limits))
    if now is not None and not goal.met(now):
        now = None
    if judge.whole:
        best = _best(judge, goal, judge.begun, now)
    elif now is not None:
        best = _climb(judge, goal, now)
    else:
        best = _from_beginnings(judge, goal)
    return now if now and best and not goal.worth(now, best) else best


def next_best(judge: Judge, goal: Goal, plan: MachinePlan) -> MachinePlan | None:
    """The best other swarm; where there are many, of those around the plan. None: none meets the goal."""
    swarms = judge.begun.swarms if judge.whole else _around(plan.counts, judge.limits)
    return _best(judge, goal, judge.candidates(swarms[(swarms != plan.counts).any(1)]))


def front(judge: Judge) -> list[MachinePlan]:
    """Plans of which none has both more samples/s and fewer dollars: the way from cheap to fast."""
    found: list[MachinePlan] = []
    step = _FRONT if judge.whole else _FRONT_OF_MANY
    plan = search(judge, Goal())
    while plan is not None and (not found or plan.dollars_hour < found[-1].dollars_hour):
        found.append(search(judge, Goal(cheapest=True, sps=plan.sps), plan.counts) or plan)
        plan = search(judge, Goal(dollars_hour=step * found[-1].dollars_hour))
    return found[::-1]


def _best(
    judge: Judge, goal: Goal, candidates: Candidates, known: MachinePlan | None = None
) -> MachinePlan | None:
    """The best of `known` and the candidates. The most promising are judged, until no other may be better."""
    values = candidates.at_most(goal)
    may = candidates.promising(goal, known)
    for at in may[np.argsort(-values[may], kind="stable")]:
        if known is not None and values[at] <= goal.value(known):
            break
        plan = judge.plan(candidates.swarms[at])
        if goal.met(plan) and (known is None or goal.value(plan) > goal.value(known)):
            known = plan
    return known


def _from_beginnings(judge: Judge, goal: Goal) -> MachinePlan | None:
    """The best that climbs reach from the most promising beginnings, and down from the fastest plan within
    the budget.
    """
    may = judge.begun.promising(goal)
    order = may[np.argsort(-judge.begun.likely(goal)[may], kind="stable")]
    unlike: dict[
        tuple[bool, ...], Sequence[int]
    ] = {}  # of those with peers of the same offers, the likeliest
    for counts in judge.begun.swarms[order].tolist():
        unlike.setdefault(tuple(count > 0 for count in counts), counts)
    starts = [plan for plan in map(judge.plan, list(unlike.values())[:_STARTS]) if goal.met(plan)]
    starts = sorted(starts, key=goal.value, reverse=True)[:_BEGINNINGS]
    if goal.sps > 0:
        fastest = search(judge, Goal(dollars_hour=goal.dollars_hour))
        starts += [fastest] if fastest is not None and goal.met(fastest) else []
    elif not starts:
        found = _best(judge, goal, judge.begun)
        starts = [found] if found is not None else []
    best = max((_climb(judge, goal, plan) for plan in starts), key=goal.value, default=None)
    return best and _beyond(judge, goal, best)


def _beyond(judge: Judge, goal: Goal, best: MachinePlan) -> MachinePlan:
    """From the best plan on by the other goal, for a little less money or a little more speed: where peers
    are exchanged beyond the limit, a better plan within it may be nearer. At last there is none near it.
    """
    while True:
        if goal.cheapest:
            other = Goal(dollars_hour=best.dollars_hour / _LITTLE)
        else:
            other = Goal(cheapest=True, sps=best.sps * _LITTLE)
        begin = next(_likeliest(judge, other, best.counts), None)
        found = begin and _climb(judge, other, begin)
        if found is None or not goal.met(found):
            found = _best(judge, goal, judge.candidates(_further(best.counts, judge.limits)), best)
        if found is None or found == best:
            return best
        best = _climb(judge, goal, found)


def _climb(judge: Judge, goal: Goal, plan: MachinePlan) -> MachinePlan:
    """From a plan that meets the goal to better ones around it, until none of the likeliest is better."""
    better: MachinePlan | None = plan
    while better is not None:
        plan = better
        better = next(_likeliest(judge, goal, plan.counts, plan), None)
    return plan


def _likeliest(
    judge: Judge, goal: Goal, counts: Sequence[int], known: MachinePlan | None = None
) -> Iterator[MachinePlan]:
    """Of the likeliest swarms around one, those that meet the goal and are better than the known plan."""
    around = judge.candidates(_around(counts, judge.limits))
    may = around.promising(goal, known)
    order = may[np.argsort(-around.likely(goal)[may], kind="stable")]
    for plan in (judge.plan(around.swarms[at]) for at in order[:_TRIES]):
        if goal.met(plan) and (known is None or goal.value(plan) > goal.value(known)):
            yield plan


def _around(counts: Sequence[int], limits: Counts) -> Counts:
    """Swarms that differ by some or all peers of one offer, or of one against another."""
    now = np.array(counts, dtype=np.int64)
    eye = np.eye(len(now), dtype=np.int64)
    present = eye[now > 0]
    most = MOST_FLAT * eye
    changes = [eye, 3 * eye, most, -present, -3 * present, -MOST_FLAT * present]
    for more, less in ((eye, 1), (eye, 2), (2 * eye, 1), (most, MOST_FLAT)):
        changes.append((more[:, None] - less * present[None]).reshape(-1, len(now)))
    found: Counts = np.unique(np.clip(now + np.concatenate(changes), 0, limits), axis=0)
    return found


def _further(counts: Sequence[int], limits: Counts) -> Counts:
    """Swarms around one, and where there are few offers those around these."""
    near = _around(counts, limits)
    if len(limits) > _FEW_OFFERS:
        return near
    return np.unique(np.concatenate([_around(one, limits) for one in near.tolist()]), axis=0)


def _beginnings(inventory: Inventory, limits: Counts) -> Counts:
    """Peers of each offer alone, and of all regions, of each one, two and three: their offers, added one by
    one, the fastest or the cheapest speed first.
    """
    offers, eye = inventory.offers, np.eye(len(limits), dtype=np.int64)
    speed = np.array([offer.sps for offer in offers])
    value = speed / np.array([max(offer.dollars_hour, 1e-9) for offer in offers])
    regions = sorted({offer.region for offer in offers})
    ways = [np.array([at]) for at in range(len(offers))]
    for size in sorted({1, 2, 3, len(regions)}):
        for chosen in itertools.combinations(regions, size):
            inside = np.flatnonzero([offer.region in chosen for offer in offers])
            ways += [inside[np.argsort(-worth[inside], kind="stable")] for worth in (speed, value)]
    found = [np.cumsum(eye[np.repeat(way, limits[way])[:MOST_FLAT]], axis=0) for way in ways]
    return np.unique(np.concatenate(found), axis=0)
