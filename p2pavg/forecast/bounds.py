"""What no swarm of an inventory exceeds, for thousands of swarms at once: samples/s and dollars. Pure.

The laws solve a linear program for each swarm. Here are conditions that each of its solutions meets, so the
true transfer takes at least as long, by a flat plan or by one of two levels:

- a peer sends and receives the vector once at least, and an owner of parts more;
- the two shares that a link of a flat plan carries, or what enters and leaves a group of near peers with two
  levels, get through the links in time, slow start included;
- peers of a group send each other's deputies, and get from them, what these add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.regions import regions
from p2pavg.forecast.inventory import Inventory
from p2pavg.forecast.laws import HOUR, INITIAL_WINDOW, PAYLOAD, WORD, LinkProfile, Overheads, ramp

Counts = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ANY = 1e13  # bytes/s: no network card is as fast
_HALVINGS = 7
_FLAT = 1.1  # how much longer than two levels a flat plan takes that leaders choose still
_AT_ONCE = 4000


class Estimates(NamedTuple):
    """Swarms: int64[swarms, offers], and float64[swarms] of each: samples/s at most, rent in dollars an hour,
    dollars of traffic for a sample at least, and dollars an hour in all, about.
    """

    swarms: Counts
    sps: F64
    rent: F64
    traffic: F64
    about: F64

    def only(self, these: Bools | npt.NDArray[np.int64]) -> Estimates:
        """Some of these."""
        return Estimates(self.swarms[these], *(column[these] for column in self[1:]))

    def beside(self, others: Estimates) -> Estimates:
        """These and others."""
        swarms = np.concatenate([self.swarms, others.swarms])
        return Estimates(swarms, *map(np.concatenate, zip(self[1:], others[1:], strict=True)))

    def dollars(self, sps: float | F64) -> F64:
        """Dollars an hour that each costs at least, if it has so many samples/s."""
        return self.rent + self.traffic * sps * HOUR

    def front(self) -> Estimates:
        """Those that are faster than all that cost as much or less, about or at least; the cheap first."""
        best = np.zeros(len(self.sps), dtype=bool)
        for dollars in (self.about, self.dollars(self.sps)):
            order = np.lexsort((-self.sps, dollars))
            before = np.maximum.accumulate(np.concatenate([[0.0], self.sps[order]]))[:-1]
            best[order] |= self.sps[order] > before
        found = self.only(best)
        return found.only(np.argsort(found.about, kind="stable"))


class Bounds:
    """Of swarms of one inventory."""

    def __init__(self, inventory: Inventory, overheads: Overheads) -> None:
        offers = inventory.offers
        self.job, self.overheads = inventory.job, overheads
        self.size = inventory.job.nbytes
        self.sps = np.array([offer.sps for offer in offers])
        self.rent = np.array([offer.dollars_hour for offer in offers])
        self.card = np.array([min(offer.up or _ANY, offer.down or _ANY) for offer in offers])
        here = [offer.region for offer in offers]
        self.group = np.array(regions(here, {}))  # zones of one region are together
        nowhere = LinkProfile(0.0, _ANY)

        def table(told: Callable[[LinkProfile], float]) -> F64:
            return np.array([[told(inventory.links.get((a, b), nowhere)) for b in here] for a in here])

        self.rate = table(lambda link: link.rate)
        self.rtt = table(lambda link: link.rtt)
        self.window = table(lambda link: float(link.streams * INITIAL_WINDOW))
        self.ramp = table(lambda link: ramp(link, link.rate * link.rtt))
        self.price = np.array([[inventory.per_gb.get((a, b), 0.0) for b in here] for a in here])
        same = self.group[:, None] == self.group  # [of the group, offers]: the cheapest way into a group
        self.into = np.where(same, self.price[:, None], np.inf).min(2)

    def of(self, counts: Counts) -> Estimates:
        """Of int64[swarms, offers], each of one peer or more; in another order."""
        counts = counts[np.argsort((counts > 0).sum(1), kind="stable")]
        told = [self._of(some) for some in np.array_split(counts, 1 + len(counts) // _AT_ONCE)]
        return Estimates(counts, *(np.concatenate(column) for column in zip(*told, strict=True)))

    def _of(self, counts: Counts) -> tuple[F64, F64, F64, F64]:
        some, job, over = _Swarms(self, counts), self.job, self.overheads
        seconds, speed = some.shortest(), counts @ self.sps
        calculation = job.target / speed
        together = over.local + over.round_trips * some.rtt + seconds
        communication = np.where(some.peers > 1, together, 0.0) + over.update
        counted = speed * WORD * some.rtt * job.delayed  # at most, beside the target
        samples = job.target + np.minimum(counted, speed * (communication - calculation).clip(0))
        longest = np.maximum(calculation, communication)
        sps = samples / (longest if job.delayed else calculation + communication)
        least, about = some.traffic(seconds)
        rent = counts @ self.rent
        return sps, rent, least / (job.target + counted), rent + about / samples * sps * HOUR


class _Swarms:
    """Many swarms, each by the offers that it has peers of: [swarms, offers] and [swarms, offers, offers]."""

    def __init__(self, bounds: Bounds, counts: Counts) -> None:
        most = max(1, int((counts > 0).sum(1).max(initial=0)))
        kinds = np.argsort(-counts, axis=1, kind="stable")[:, :most]
        pairs = kinds[:, :, None], kinds[:, None, :]
        self.size = bounds.size
        self.held = np.take_along_axis(counts, kinds, 1).astype(float)
        self.peers = self.held.sum(1)
        self.links = self.held[:, :, None] * (self.held[:, None, :] - np.eye(most))
        group = bounds.group[kinds]
        self.near = (group[:, :, None] == group[:, None, :]).astype(float)
        self.here = self._of_group(self.held)  # peers of the offer's group
        self.rate, self.trip, self.window, self.ramp, self.price, self.into = (
            table[pairs]
            for table in (bounds.rate, bounds.rtt, bounds.window, bounds.ramp, bounds.price, bounds.into)
        )
        self.card = np.where(self.held > 0, bounds.card[kinds], _ANY)
        self.rtt = np.where(self.links > 0, self.trip, 0.0).max((1, 2))
        self.levels = (self.here < self.peers[:, None]).any(1) & (self.here > 1).any(1)

    def shortest(self) -> F64:
        """Seconds that a transfer takes at least."""
        low: F64 = self.size / self.card.min(1)
        high = np.maximum(low, 1e-6)
        while not (done := self._may_fit(high)).all():
            low, high = np.where(done, low, high), np.where(done, high, 2 * high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            done = self._may_fit(middle)
            low, high = np.where(done, low, middle), np.where(done, middle, high)
        return low

    def traffic(self, seconds: F64) -> tuple[F64, F64]:
        """Dollars that an epoch's bytes cost at least, with the cheapest owner of all parts; and about, with
        the largest parts that a transfer of so long lets each own.
        """
        to_peers = np.einsum("sij,sj->si", self.price, self.held) - self.price.diagonal(axis1=1, axis2=2)
        each = self.held / np.maximum(self.here, 1)  # of its group, so that a group counts once
        to_groups = np.einsum("sij,sj->si", self.into * (1 - self.near), each)
        to_deputies = (each * (self.here - 1) * self.into.diagonal(axis1=1, axis2=2)).sum(1)
        owned = self._owned(seconds, self._carried(seconds)) + 1e-9 * self.held
        owned /= owned.sum(1, keepdims=True)
        flat, stacked = (np.where(self.held > 0, to, np.inf).min(1) for to in (to_peers, to_groups))
        least = np.where(self.levels, np.minimum(flat, to_deputies + stacked), flat)
        flat, stacked = ((owned * to).sum(1) for to in (to_peers, to_groups))
        longer = _FLAT * seconds
        about = np.where(self._flat(longer, self._carried(longer)), flat, to_deputies + stacked)
        both = 2 * self.size / PAYLOAD / 1e9
        return both * least, both * about

    def _may_fit(self, seconds: F64) -> Bools:
        """Whether a transfer of so long meets the conditions of a flat plan, or of one of two levels."""
        each = self._carried(seconds)
        carried = each * self.links
        inside, across = (self._of_group((carried * way).sum(2)) for way in (self.near, 1 - self.near))
        stacked = inside >= 2 * (self.here - 1) * self.size
        stacked &= across >= self.size
        stacked &= seconds[:, None] * self._of_group(self.held * self.card) >= (2 * self.here - 1) * self.size
        found: Bools = self._flat(seconds, each) | (self.levels & (stacked | (self.held == 0)).all(1))
        return found

    def _flat(self, seconds: F64, each: F64) -> Bools:
        """Whether it meets those of a flat plan, when links carry so much each."""
        owned = self._owned(seconds, each).sum(1) >= 1
        crossed = (each * self.links).sum((1, 2)) >= 2 * (self.peers - 1) * self.size
        found: Bools = (owned & crossed) | (self.peers < 2)
        return found

    def _owned(self, seconds: F64, each: F64) -> F64:
        """What each offer's peers may own of a flat plan, as much as a card and its slowest link let."""
        slowest = np.where(self.links > 0, each, np.inf).min(2)
        others = np.maximum(self.peers - 2, 1e-9)[:, None]
        by_card = (seconds[:, None] * self.card / self.size - 1) / others
        found: F64 = self.held * np.minimum(by_card, slowest / self.size).clip(0, 1)
        return found

    def _carried(self, seconds: F64) -> F64:
        """Bytes that each link carries within so many seconds: `laws.ramp`, the other way round."""
        time = seconds[:, None, None]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            early = self.window * (np.exp2(time / self.trip) - 1)
        early = np.minimum(early, self.rate * time)
        late = self.rate * (time - self.ramp)
        found: F64 = np.where(early < self.rate * self.trip, early, late).clip(0)
        return found

    def _of_group(self, values: F64) -> F64:
        """The sum over the offers of each offer's group."""
        found: F64 = np.einsum("sij,sj->si", self.near, values)
        return found
