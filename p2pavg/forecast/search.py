"""The choice of machines to rent: counts of each offer that give most for the money. Pure.

A swarm of `counts` is judged by a bound that thousands of swarms can be judged by at once: parts are sized
for the slowest rate each peer has to any other, so the true transfer, by the linear program, is at most as
long. Spaces of up to `EXHAUSTIVE` swarms are searched whole, others from several beginnings by adding,
removing and exchanging peers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg.forecast.inventory import Inventory
from p2pavg.forecast.laws import HOUR, LinkProfile, Overheads, PeerProfile, ramp

EXHAUSTIVE = 20_000
LARGEST = 32  # members of a flat group
KEEP = 1.05  # the plan at hand is left for another that is better by more than this factor
_HALVINGS = 12
_ANY = 1e13  # bytes/s: no network card is as fast
_ROUNDS = 200
_FAR = 1e8  # beyond any score of a swarm that meets the goal
_SAME = 1e-6
_BEGINNINGS = 12  # the most promising ones

Counts = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Goal:
    """Most samples/s for at most `dollars_hour`, or least dollars an hour for at least `sps`."""

    dollars_hour: float | None = None
    sps: float | None = None


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """So many of each offer, and what the bound makes of them."""

    counts: tuple[int, ...]
    sps: float
    dollars_hour: float

    @property
    def dollars_per_million(self) -> float:
        return self.dollars_hour / HOUR / self.sps * 1e6


class Judge:
    """Judges swarms from one inventory, many at once. most: of each offer; None: what the inventory says.
    Of an offer with less memory than the job needs there is none.
    """

    def __init__(
        self, inventory: Inventory, overheads: Overheads | None = None, most: Sequence[int] | None = None
    ) -> None:
        offers, job = inventory.offers, inventory.job
        self.inventory = inventory
        self._job = job
        self.overheads = overheads or Overheads()
        self.limits = np.array([offer.count for offer in offers] if most is None else most, dtype=np.int64)
        self.limits[[not offer.fits(job) for offer in offers]] = 0
        self._sps = np.array([offer.sps for offer in offers])
        self._rent = np.array([offer.dollars_hour for offer in offers])
        self._card = np.array([min(offer.up or _ANY, offer.down or _ANY) for offer in offers])
        regions = sorted({offer.region for offer in offers})
        place = {region: index for index, region in enumerate(regions)}
        self.regions = np.array([place[offer.region] for offer in offers])
        self._regions = np.eye(len(regions), dtype=np.int64)[self.regions]  # [offers, regions]
        none = LinkProfile(0.0, _ANY)
        links = [[inventory.links.get((a, b), none) for b in regions] for a in regions]
        self._rates = np.array([[link.rate for link in row] for row in links])
        self._rtts = np.array([[link.rtt for link in row] for row in links])
        self._ramps = np.array([[ramp(link, link.rate * link.rtt) for link in row] for row in links])
        self._prices = np.array([[inventory.per_gb.get((a, b), 0.0) for b in regions] for a in regions])
        self._size = (job.contribution_bytes + job.result_bytes) / 2

    def judge(self, counts: Counts) -> tuple[F64, F64]:
        """(samples/s, dollars/h) of int64[swarms, offers]; 0 and infinity for what is no swarm."""
        peers = counts.sum(1)
        speed = counts @ self._sps
        with np.errstate(divide="ignore", invalid="ignore"):
            calculation = np.where(speed > 0, self._job.target / speed, np.inf)
            shares, moved = self._transfer(counts, peers)
            pairs = self._pairs(counts)
            rtt, risen = (np.where(pairs, table, 0.0).max((1, 2)) for table in (self._rtts, self._ramps))
            over = self.overheads
            communication = (
                np.where(peers > 1, over.local + over.round_trips * rtt + moved + risen, 0.0) + over.update
            )
            whole = (
                np.maximum(calculation, communication) if self._job.delayed else calculation + communication
            )
            sps = np.where((peers > 0) & (peers <= LARGEST), self._job.target / whole, 0.0)
            money = counts @ self._rent + self._traffic(counts, shares) * HOUR / whole
        return sps, np.where(sps > 0, money, np.inf)

    def _pairs(self, counts: Counts) -> npt.NDArray[np.bool_]:
        """[swarms, regions, regions]: whether two peers exchange bytes between these."""
        held = counts @ self._regions
        there = held > 0
        pairs = there[:, :, None] & there[:, None, :]
        inside = np.arange(len(self._rates))
        pairs[:, inside, inside] = held > 1
        found: npt.NDArray[np.bool_] = pairs
        return found

    def _transfer(self, counts: Counts, peers: Counts) -> tuple[F64, F64]:
        """(share of each offer's peers, seconds), sized so that none exceeds what its slowest rate allows."""
        rows = np.arange(len(counts))[:, None]
        most = max(1, int((counts > 0).sum(1).max()))
        kinds = np.argpartition(-counts, most - 1, axis=1)[:, :most]  # the offers of each swarm
        held = counts[rows, kinds]
        slowest = np.where(self._pairs(counts), self._rates, np.inf).min(2)[rows, self.regions[kinds]]
        n = peers[:, None].astype(float)
        card = self._card[kinds]

        def largest(seconds: F64) -> F64:
            """The largest share of each offer's peers that moves within so many seconds.

            A peer of share x sends S(1 + (n-2)x) in all, receives as much, and at most 2Sx to each other one.
            """
            by_card = np.where(n > 2, (seconds * card / self._size - 1) / np.maximum(n - 2, 1), np.inf)
            found: F64 = np.clip(np.minimum(by_card, seconds * slowest / (2 * self._size)), 0.0, 1.0)
            return found

        def moved(seconds: F64) -> F64:
            found: F64 = (held * largest(seconds[:, None])).sum(1)
            return found

        low = np.where(held > 0, self._size / card, 0.0).max(1)
        high = np.maximum(low, 1e-9)
        while not (enough := (moved(high) >= 1) | (peers == 0)).all():
            high = np.where(enough, high, 2 * high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = moved(middle) >= 1
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        below, above = moved(low), moved(high)
        high = np.where(
            above > 1, low + (high - low) * (1 - below).clip(0) / np.maximum(above - below, 1e-30), high
        )
        found = held * largest(high[:, None])
        shares = np.zeros(counts.shape)
        each = np.where(held > 0, found / np.maximum(held, 1), 0.0) / np.maximum(
            found.sum(1, keepdims=True), 1e-30
        )
        shares[rows, kinds] = each
        return shares, high

    def _traffic(self, counts: Counts, shares: F64) -> F64:
        """Dollars of an epoch's bytes: a peer sends S(x_i + x_j) to each other one."""
        held = (counts * shares) @ self._regions
        peers = (counts @ self._regions).astype(float)
        both = 2 * np.einsum("si,ij,sj->s", held, self._prices, peers)
        own = 2 * held @ np.diag(self._prices)
        found: F64 = self._size / 1e9 * (both - own)
        return found

    def plan(self, counts: Sequence[int]) -> MachinePlan:
        """One swarm, judged."""
        sps, money = self.judge(np.array([counts]))
        return MachinePlan(tuple(int(count) for count in counts), float(sps[0]), float(money[0]))

    def swarm(self, plan: MachinePlan) -> tuple[list[PeerProfile], dict[tuple[int, int], LinkProfile]]:
        """The plan's peers and links, for `laws.epoch`."""
        offers = self.inventory.offers
        kinds = [i for i, count in enumerate(plan.counts) for _ in range(count)]
        numbers = itertools.count(1)
        members = [
            PeerProfile(
                f"{offers[i].name}#{next(numbers)}",
                offers[i].region,
                offers[i].sps,
                offers[i].up,
                offers[i].down,
                offers[i].dollars_hour,
            )
            for i in kinds
        ]
        links = {
            (a, b): self.inventory.links[offers[i].region, offers[j].region]
            for a, i in enumerate(kinds)
            for b, j in enumerate(kinds)
            if a != b
        }
        return members, links


def _better(goal: Goal, sps: F64, money: F64) -> F64:
    """The score that a search maximises: swarms that meet the goal first, others by how near they are."""
    money = np.minimum(money, _FAR)
    if goal.dollars_hour is not None:
        near = sps * (goal.dollars_hour / np.maximum(money, 1e-12)) ** 2 - _FAR
        return np.where(money <= goal.dollars_hour, sps, near)
    assert goal.sps is not None
    return np.where(sps >= goal.sps, _FAR - money, sps - 2 * _FAR)


def search(
    judge: Judge, goal: Goal, begin: Sequence[int] | None = None, whole: bool | None = None
) -> MachinePlan | None:
    """The best swarm found; None: none meets the goal.

    begin: the plan at hand, kept unless another is better by `KEEP`. whole: whether every swarm is judged;
    None: where there are few.
    """
    limits = judge.limits
    space = float(np.prod((limits + 1).astype(float)))
    if space <= EXHAUSTIVE if whole is None else whole:
        swarms = np.array(list(itertools.product(*(range(limit + 1) for limit in limits))), dtype=np.int64)
        scores = _better(goal, *judge.judge(swarms))
        best = swarms[int(scores.argmax())].tolist()
    else:
        best = _climb(judge, goal, limits, begin).tolist()
    found = judge.plan(best)
    now = None if begin is None else judge.plan(np.minimum(begin, limits).tolist())
    if now is not None and _meets(goal, now) and not _worth(goal, now, found):
        return now
    return found if _meets(goal, found) else None


def _meets(goal: Goal, plan: MachinePlan) -> bool:
    if goal.dollars_hour is not None:
        return plan.sps > 0 and plan.dollars_hour <= goal.dollars_hour
    assert goal.sps is not None
    return plan.sps >= goal.sps


def _worth(goal: Goal, now: MachinePlan, other: MachinePlan) -> bool:
    """Whether to leave the plan at hand."""
    if goal.dollars_hour is not None:
        return other.sps > KEEP * now.sps
    return KEEP * other.dollars_hour < now.dollars_hour


def _climb(judge: Judge, goal: Goal, limits: Counts, begin: Sequence[int] | None) -> Counts:
    """From each beginning, the best of all additions, removals and exchanges, until none is better."""
    moves = _moves(limits)
    if begin is None:
        states, ways = _beginnings(judge, limits)
    else:
        states, ways = np.minimum([begin], limits), np.zeros(1, dtype=np.int64)
    scores = _better(goal, *judge.judge(states))
    order = np.argsort(-scores, kind="stable")
    _, first = np.unique(ways[order], return_index=True)  # the best of each way
    order = order[np.sort(first)][:_BEGINNINGS]
    best: Counts = states[order[0]]
    best_score = float(scores[order[0]])
    for state, score in [(states[i], float(scores[i])) for i in order]:
        for _ in range(_ROUNDS):
            tried = np.clip(state + moves, 0, limits)
            found = _better(goal, *judge.judge(tried))
            at = int(found.argmax())
            if found[at] <= score + _SAME:
                break
            state, score = tried[at], float(found[at])
        if score > best_score:
            best, best_score = state, score
    return best


def _moves(limits: Counts) -> Counts:
    """Changes of the counts that are tried: some or all of an offer, alone or against another offer's."""
    offers = len(limits)
    eye = np.eye(offers, dtype=np.int64)
    found = [step * eye for step in (1, -1, 3, -3)] + [np.diag(limits), -np.diag(limits)]
    for i in range(offers):
        others = [j for j in range(offers) if j != i]
        for more, less in ((1, 1), (1, 2), (2, 1), (int(limits[i]), LARGEST)):
            found.append(more * eye[i] - less * eye[others])
    moves: Counts = np.concatenate(found)
    return moves


def _beginnings(judge: Judge, limits: Counts) -> tuple[Counts, Counts]:
    """For each one, two or three regions: their offers, added one by one, the fastest or the cheapest speed
    first; and the way by which each swarm was made.
    """
    offers = judge.inventory.offers
    speed = np.array([offer.sps for offer in offers])
    value = speed / np.array([max(offer.dollars_hour, 1e-9) for offer in offers])
    found = [np.zeros((1, len(offers)), dtype=np.int64)]
    regions = range(int(judge.regions.max()) + 1)
    for size in (1, 2, 3):
        for chosen in itertools.combinations(regions, size):
            inside = np.flatnonzero(np.isin(judge.regions, chosen))
            for worth in (speed, value):
                ordered = inside[np.argsort(-worth[inside], kind="stable")]
                peers = np.repeat(ordered, limits[ordered])[:LARGEST]
                found.append(np.cumsum(np.eye(len(offers), dtype=np.int64)[peers], axis=0))
    ways = np.repeat(np.arange(len(found)), [len(states) for states in found])
    return np.concatenate(found), ways


def front(judge: Judge, plans: int = 40) -> list[MachinePlan]:
    """Plans of which none has both more samples/s and fewer dollars: the way from cheap to fast."""
    everything = judge.plan(np.minimum(judge.limits, LARGEST).tolist())
    fastest = search(judge, Goal(dollars_hour=1e12)) or everything
    found: dict[tuple[int, ...], MachinePlan] = {fastest.counts: fastest}
    for share in np.linspace(0.02, 1.0, plans):
        plan = search(judge, Goal(sps=float(share) * fastest.sps))
        if plan is not None:
            found[plan.counts] = plan
    ordered = sorted(found.values(), key=lambda plan: plan.dollars_hour)
    kept: list[MachinePlan] = []
    for plan in ordered:
        if not kept or plan.sps > kept[-1].sps:
            kept.append(plan)
    return kept
