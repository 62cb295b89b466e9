"""Newcomers: what the states that they download add to an epoch's bytes, and take of its speed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from p2pavg.errors import ConfigurationError
from p2pavg.forecast.laws import BYTES, HOUR, PAYLOAD, EpochForecast, Swarm, Workload

ACKNOWLEDGED = 52 / 2896  # of what comes: 52 bytes for each second segment of 1,448 (RFC 5681, 4.2)
_AS_NEAR = 1.1  # times the round trip of the nearest donor


class TooManyJoinsError(ConfigurationError):
    """States would take all of the peers' time."""


@dataclass(frozen=True, slots=True)
class Newcomers:
    """each_hour: how often a peer leaves and comes back, or another in its place, as one that needs the
    state. state: bytes of it.
    """

    each_hour: float = 0.0
    state: float = 0.0


@dataclass(frozen=True, slots=True)
class JoinForecast:
    """seconds: until the state is there, in which the newcomer calculates nothing; share: of all peers' time.
    IP bytes of one join, of the joins of an epoch, and of one result, which is all that is handed to a member
    that missed an average.
    """

    seconds: float
    share: float
    nbytes: float
    an_epoch: float
    result: float


def with_newcomers(
    job: Workload, swarm: Swarm, newcomers: Newcomers, epoch: Callable[[Workload, Swarm], EpochForecast]
) -> tuple[EpochForecast, JoinForecast | None]:
    """An epoch in which as many come as in others. epoch: without any. None: nobody comes, or gives a state.

    Any peer comes as often as any other, and its state from those that are nearest to it. While it is on its
    way, results are made that follow it.
    """
    donors = [_donors(swarm, at) for at in range(len(swarm.members))]
    if not newcomers.each_hour or not any(donors):
        return epoch(job, swarm), None
    state, result = newcomers.state / PAYLOAD, job.values * BYTES[job.result] / PAYLOAD
    seconds = mean(state / _rate(swarm, one, at) for at, those in enumerate(donors) for one in those)
    share = newcomers.each_hour * seconds / HOUR
    if share >= 1:
        raise TooManyJoinsError(
            f"a state of {newcomers.state / 1e9:,.3g} GB takes {seconds:,.0f} s over these links, and each "
            f"peer comes every {HOUR / newcomers.each_hour:,.0f} s: nobody would ever calculate; tell fewer "
            "--joins-per-hour"
        )
    slower = [replace(member, sps=member.sps * (1 - share)) for member in swarm.members]
    found = epoch(job, replace(swarm, members=slower))
    each, often = state + seconds / found.total * result, newcomers.each_hour * found.total / HOUR
    wire = dict(found.wire)
    for at, those in enumerate(donors):
        for one in those:
            wire[one, at] += often * each / len(those)
            wire[at, one] += often * each / len(those) * ACKNOWLEDGED
    both = 1 + ACKNOWLEDGED
    came = often * both * each * sum(map(bool, donors))
    return replace(found, wire=wire), JoinForecast(seconds, share, both * each, came, both * result)


def _donors(swarm: Swarm, newcomer: int) -> Sequence[int]:
    """Those that members ask first: the nearest."""
    trips = {one: link.rtt for (one, other), link in swarm.links.items() if other == newcomer}
    nearest = min(trips.values(), default=0.0)
    return [one for one, trip in trips.items() if trip <= _AS_NEAR * nearest]


def _rate(swarm: Swarm, donor: int, newcomer: int) -> float:
    """Bytes/s, as both have over their best links: a state has the link for itself."""
    out = max(link.rate for (one, _), link in swarm.links.items() if one == donor)
    into = max(link.rate for (_, other), link in swarm.links.items() if other == newcomer)
    cards = swarm.members[donor].up, swarm.members[newcomer].down
    return min(out, into, *(card for card in cards if card))
