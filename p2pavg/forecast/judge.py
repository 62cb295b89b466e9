"""Swarms of an inventory, judged by the laws: what each gives and costs, and which may be the best. Pure.
Pure.

To judge takes milliseconds, so `Bounds` says of many swarms at once which of them may be the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pavg.forecast.bounds import F64, Bounds, Counts
from p2pavg.forecast.inventory import Inventory, MachineOffer
from p2pavg.forecast.laws import Overheads, PeerProfile, Swarm, dollars_per_hour, epoch
from p2pavg.plan import MOST_FLAT

EXHAUSTIVE = 20_000
KEEP = 1.05  # the plan at hand is left for another that is better by more than this factor
_AT_ONCE = 10_000
_FEW_OFFERS = 6


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

    def only(self, these: npt.NDArray[np.bool_]) -> Candidates:
        """Some of these."""
        return Candidates(self.swarms[these], self.sps[these], self.least[these], self.about[these])

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


class Rung(NamedTuple):
    """A budget, in dollars an hour, the fastest plan found within it, and what was judged to find that."""

    budget: float
    plan: MachinePlan
    seen: tuple[MachinePlan, ...] = ()


class Judge:
    """Judges swarms from one inventory. Of an offer that does not hold the model there is none."""

    def __init__(self, inventory: Inventory, overheads: Overheads | None = None) -> None:
        self.inventory = inventory
        self.overheads = overheads or Overheads()
        self._bounds = Bounds(inventory, self.overheads)
        counts = [min(offer.count, MOST_FLAT) * offer.fits for offer in inventory.offers]
        self.limits = np.array(counts, dtype=np.int64)
        self.whole = float(np.prod(self.limits + 1.0)) <= EXHAUSTIVE
        self._known: dict[tuple[int, ...], MachinePlan] = {}
        self.rungs: list[Rung] = []  # of the ladder of `search`, so far

    def candidates(
        self, swarms: Counts, goal: Goal | None = None, known: MachinePlan | None = None
    ) -> Candidates:
        """Swarms of one peer up to as many as are tested, with their bounds; without those of which the rent
        or the peers' speeds alone say that they miss the goal or are no better than a known plan.
        """
        swarms = swarms[(swarms.sum(1) > 0) & (swarms.sum(1) <= MOST_FLAT)]
        if goal is not None and known is not None:
            rent, speed = swarms @ self._bounds.rent, swarms @ self._bounds.sps
            dollars = min(goal.dollars_hour, known.dollars_hour) if goal.cheapest else goal.dollars_hour
            sps = goal.sps if goal.cheapest else max(goal.sps, known.sps)
            swarms = swarms[(rent <= dollars) & (speed >= sps)]
        told = [self._bounds.of(some) for some in np.array_split(swarms, 1 + len(swarms) // _AT_ONCE)]
        return Candidates(swarms, *(np.concatenate(column) for column in zip(*told, strict=True)))

    def within(self, most: Sequence[int]) -> Judge:
        """A judge of what is left with no more than so many of each offer, who knows what this one knows."""
        there = copy(self)
        there.limits = np.minimum(most, self.limits)
        there.rungs = []
        there.begun = self.begun.only(np.all(self.begun.swarms <= there.limits, axis=1))
        return there

    @cached_property
    def begun(self) -> Candidates:
        """Every swarm, where there are few, else those from which a search begins."""
        if self.whole:
            ways = itertools.product(*(range(limit + 1) for limit in self.limits))
            return self.candidates(np.array(list(ways), dtype=np.int64))
        return self.candidates(beginnings(self.inventory.offers, self.limits))

    def plan(self, counts: Sequence[int] | Counts) -> MachinePlan:
        """One swarm, judged by the laws."""
        key = tuple(int(count) for count in counts)
        if key not in self._known:
            self._known[key] = MachinePlan(key, 0.0, 0.0) if not any(key) else self._judged(key)
        return self._known[key]

    def judged(self) -> list[MachinePlan]:
        """What was judged so far, of what is there."""
        return [plan for counts, plan in self._known.items() if (counts <= self.limits).all()]

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


def around(counts: Sequence[int], limits: Counts) -> Counts:
    """Swarms that differ by some or all peers of one offer, or of one against another; and where there are
    few offers, by two such changes.
    """
    eye = np.eye(len(limits), dtype=np.int64)
    found = np.array([counts], dtype=np.int64)
    for _ in range(1 if len(limits) > _FEW_OFFERS else 2):
        found = np.unique(np.concatenate([_changed(now, eye, limits) for now in found]), axis=0)
    return found


def _changed(now: Counts, eye: Counts, limits: Counts) -> Counts:
    present, most = eye[now > 0], MOST_FLAT * eye
    changes = [eye, 3 * eye, most, -present, -3 * present, -MOST_FLAT * present]
    for more, less in ((eye, 1), (eye, 2), (2 * eye, 1), (most, MOST_FLAT)):
        changes.append((more[:, None] - less * present[None]).reshape(-1, len(now)))
    found: Counts = np.clip(now + np.concatenate(changes), 0, limits)
    return found


def beginnings(offers: Sequence[MachineOffer], limits: Counts) -> Counts:
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
    found += [np.minimum(eye + times * other, limits) for times in (1, 3, 9) for other in eye]
    return np.unique(np.concatenate(found), axis=0)
