"""What no swarm of an inventory exceeds, for thousands of swarms at once: samples/s and dollars. Pure.

The laws solve a linear program for each swarm. Here are conditions that each of its solutions meets, so the
true transfer takes at least as long, by a flat plan or by one of two levels:

- a peer sends and receives the vector once at least, and an owner of parts more;
- the two shares that a link of a flat plan carries, or what enters and leaves a group of near peers with two
  levels, get through the links in time, slow start included;
- peers of a group send each other's deputies, and get from them, what these add up.

Parts that need no more than half of each link's rate say how long it takes at most.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from p2pavg.allreduce.regions import regions
from p2pavg.forecast.inventory import Inventory
from p2pavg.forecast.laws import HOUR, INITIAL_WINDOW, WORD, LinkProfile, Overheads, ramp

Counts = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_ANY = 1e13  # bytes/s: no network card is as fast
_HALVINGS = 10
_DEARER = 1.07  # shares of a round are nearly the fastest, and a short vector's chunks have more headers
_UNKNOWN = 10.0  # as in `partition`: a card that nobody measured is so many times faster than a link


class Bounds:
    """Of swarms of one inventory."""

    def __init__(self, inventory: Inventory, overheads: Overheads) -> None:
        offers = inventory.offers
        self._job, self._overheads = inventory.job, overheads
        self._size = (inventory.job.contribution_bytes + inventory.job.result_bytes) / 2
        self.sps = np.array([offer.sps for offer in offers])
        self.rent = np.array([offer.dollars_hour for offer in offers])
        self._card = np.array([min(offer.up or _ANY, offer.down or _ANY) for offer in offers])
        here = [offer.region for offer in offers]
        self._group = np.array(regions(here, {}))  # zones of one region are together
        nowhere = LinkProfile(0.0, _ANY)
        links = [inventory.links.get((a, b), nowhere) for a in here for b in here]

        def table(values: list[float]) -> F64:
            return np.array(values).reshape(len(offers), len(offers))

        self._rate = table([link.rate for link in links])
        self._rtt = table([link.rtt for link in links])
        self._window = table([float(link.streams * INITIAL_WINDOW) for link in links])
        self._ramp = table([ramp(link, link.rate * link.rtt) for link in links])
        self._price = table([inventory.per_gb.get((a, b), 0.0) for a in here for b in here])
        same = self._group[:, None] == self._group  # [of the group, offers]: the cheapest way into a group
        self._into = np.where(same, self._price[:, None], np.inf).min(2)

    def of(self, counts: Counts) -> tuple[F64, F64, F64]:
        """(samples/s at most, dollars an hour at least, dollars about) of int64[swarms, offers], each of one
        peer or more.
        """
        some = _Swarms(self, counts)
        speed = counts @ self.sps
        calculation = self._job.target / speed
        at_most, shares = some.longest()
        quick, slow = (self._communication(some, moved) for moved in (some.shortest(), at_most))
        samples = np.full(len(counts), self._job.target)
        if self._job.delayed:
            samples += speed * np.minimum(np.maximum(quick - calculation, 0), WORD * some.rtt)
            shortest, longest = np.maximum(calculation, quick), np.maximum(calculation, slow)
        else:
            shortest, longest = calculation + quick, calculation + slow
        least, about = some.traffic(shares)
        rent = counts @ self.rent
        return samples / shortest, rent + least * HOUR / longest, rent + about * HOUR / shortest

    def _communication(self, some: _Swarms, moved: F64) -> F64:
        over = self._overheads
        together = over.local + over.round_trips * some.rtt + moved
        found: F64 = np.where(some.peers > 1, together, 0.0) + over.update
        return found


class _Swarms:
    """Many swarms, each by the offers that it has peers of: [swarms, offers] and [swarms, offers, offers]."""

    def __init__(self, bounds: Bounds, counts: Counts) -> None:
        most = max(1, int((counts > 0).sum(1).max(initial=0)))
        kinds = np.argsort(-counts, axis=1, kind="stable")[:, :most]
        pairs = kinds[:, :, None], kinds[:, None, :]
        self.size = bounds._size
        self.held = np.take_along_axis(counts, kinds, 1).astype(float)
        self.peers = self.held.sum(1)
        self.links = self.held[:, :, None] * (self.held[:, None, :] - np.eye(most))
        group = bounds._group[kinds]
        self.near = (group[:, :, None] == group[:, None, :]).astype(float)
        self.here = np.einsum("sij,sj->si", self.near, self.held)  # peers of the offer's group
        self.rate, self.trip, self.window, self.ramp = (
            table[pairs] for table in (bounds._rate, bounds._rtt, bounds._window, bounds._ramp)
        )
        self.price, self.into = bounds._price[pairs], bounds._into[pairs]
        self.slowest = np.where(self.links > 0, self.rate, np.inf).min(2)
        self.card = np.where(self.held > 0, bounds._card[kinds], _ANY)
        self.rtt = np.where(self.links > 0, self.trip, 0.0).max((1, 2))
        self.levels = (self.here < self.peers[:, None]).any(1) & (self.here > 1).any(1)

    def shortest(self) -> F64:
        """Seconds that a transfer takes at least."""
        return self._first(self._may_fit)[0]

    def longest(self) -> tuple[F64, F64]:
        """Seconds that it takes at most: a flat plan whose parts need half of their slowest link; and what of
        the vector each offer's peers own then.
        """
        card = np.minimum(self.card, _UNKNOWN * self.slowest.min(1, keepdims=True))

        def owned(seconds: F64) -> F64:
            return self._owned(seconds, card, seconds[:, None] * self.slowest / (2 * self.size))

        _, seconds = self._first(lambda seconds: (owned(seconds).sum(1) >= 1) | (self.peers < 2))
        shares = owned(seconds) + 1e-9 * self.held
        slow_start = np.where(self.links > 0, self.ramp, 0.0).max((1, 2))
        return _DEARER * seconds + slow_start, shares / shares.sum(1, keepdims=True)

    def _first(self, fits: Callable[[F64], npt.NDArray[np.bool_]]) -> tuple[F64, F64]:
        """The least seconds that fit, between two near each other."""
        low: F64 = self.size / self.card.min(1)
        high = np.maximum(low, 1e-6)
        while not (done := fits(high)).all():
            low, high = np.where(done, low, high), np.where(done, high, 2 * high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            done = fits(middle)
            low, high = np.where(done, low, middle), np.where(done, middle, high)
        return low, high

    def traffic(self, shares: F64) -> tuple[F64, F64]:
        """Dollars that an epoch's bytes cost at least, with the cheapest owner of all parts; and about, with
        such shares.
        """
        to_peers = np.einsum("sij,sj->si", self.price, self.held) - np.einsum("sii->si", self.price)
        each = self.held / np.maximum(self.here, 1)  # of its group, so that a group counts once
        to_groups = np.einsum("sij,sj->si", self.into * (1 - self.near), each)
        to_deputies = (each * (self.here - 1) * np.einsum("sii->si", self.into)).sum(1)

        def least(values: F64) -> F64:
            found: F64 = np.where(self.held > 0, values, np.inf).min(1)
            return found

        def about(values: F64) -> F64:
            found: F64 = (values * shares).sum(1)
            return found

        def dollars(owned: Callable[[F64], F64]) -> F64:
            flat, stacked = owned(to_peers), to_deputies + owned(to_groups)
            return 2 * self.size / 1e9 * np.where(self.levels, np.minimum(flat, stacked), flat)

        return dollars(least), dollars(about)

    def _owned(self, seconds: F64, card: F64, by_link: F64) -> F64:
        """What each offer's peers may own of a flat plan, as much as a card and its slowest link let."""
        others = np.maximum(self.peers - 2, 1e-9)[:, None]
        by_card = (seconds[:, None] * card / self.size - 1) / others
        found: F64 = self.held * np.minimum(by_card, by_link).clip(0, 1)
        return found

    def _may_fit(self, seconds: F64) -> npt.NDArray[np.bool_]:
        """Whether a transfer of so long meets the conditions of a flat plan, or of one of two levels."""
        each = self._carried(seconds)
        carried = each * self.links
        slowest = np.where(self.links > 0, each, np.inf).min(2)
        flat = self._owned(seconds, self.card, slowest / self.size).sum(1) >= 1
        flat &= carried.sum((1, 2)) >= 2 * (self.peers - 1) * self.size
        inside, across, cards = (
            np.einsum("sij,sj->si", self.near, found)
            for found in (
                (carried * self.near).sum(2),
                (carried * (1 - self.near)).sum(2),
                self.held * self.card,
            )
        )
        stacked = inside >= 2 * (self.here - 1) * self.size
        stacked &= across >= self.size
        stacked &= seconds[:, None] * cards >= (2 * self.here - 1) * self.size
        levels = self.levels & (stacked | (self.held == 0)).all(1)
        found: npt.NDArray[np.bool_] = flat | levels | (self.peers < 2)
        return found

    def _carried(self, seconds: F64) -> F64:
        """Bytes that a link carries within so many seconds: `laws.ramp`, the other way round."""
        time = seconds[:, None, None]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            early = self.window * (np.exp2(time / self.trip) - 1)
        early = np.minimum(early, self.rate * time)
        late = self.rate * (time - self.ramp)
        found: F64 = np.where(early < self.rate * self.trip, early, late).clip(0)
        return found
