"""How long an epoch takes, and what it costs: the laws, as functions of speeds, links and prices. Pure.

An epoch is calculation, samples over the sum of local speeds, and communication: a few round trips of the
furthest member, and the transfer of a flat butterfly, S·max(costs · shares), with the shares that
`allreduce.partition` would give. Constants in round trips were measured on emulated links (docs/forecast.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from p2pavg import codecs
from p2pavg.allreduce.partition import Capacity, costs, shares

CHUNK = 128 * 1024  # values, of long vectors
FRAME_BYTES = 40  # of a chunk's header on the wire
BYTES = {name: (codecs.get(name).encoded_size(CHUNK) + FRAME_BYTES) / CHUNK for name in codecs.WIRE_IDS}
"""Bytes of a value on the wire, by codec."""
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class PeerProfile:
    """A peer. sps: samples/s between two rounds. Rates in bytes/s, None: no limit of its own."""

    name: str
    region: str
    sps: float
    up: float | None = None
    down: float | None = None
    dollars_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Between two peers, one way. rtt in seconds, rate in bytes/s over all streams."""

    rtt: float
    rate: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """What an epoch takes beside calculation and bytes: round trips of the furthest member, and seconds.

    waiting to transfer are counted in round trips; `local` is what is left at a round trip of zero, and
    `update` is decoding and the optimizer's step. relative: standard deviation of a prediction, as a share.
    """

    waiting: float = 0.76
    matchmaking: float = 1.0
    transfer: float = 1.2
    commit: float = 0.9
    local: float = 0.02
    update: float = 0.0
    relative: float = 0.04

    @property
    def round_trips(self) -> float:
        return self.waiting + self.matchmaking + self.transfer + self.commit


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained. values: elements of the vector. contribution, result: codecs by name.

    delayed: communication hides behind the next epoch's calculation. An epoch of outer steps has the samples
    of all its local steps. steps: samples of one step of every peer together, by which an average may exceed
    the target; 0: not known.
    """

    target: float
    values: float
    contribution: str = "fp16"
    result: str = "fp16"
    delayed: bool = False
    memory: float = 0.0  # bytes that one peer needs at least
    steps: float = 0.0

    @property
    def contribution_bytes(self) -> float:
        return self.values * BYTES[self.contribution]

    @property
    def result_bytes(self) -> float:
        return self.values * BYTES[self.result]

    def with_target(self, target: float) -> Workload:
        return replace(self, target=target)


@dataclass(frozen=True, slots=True)
class TransferForecast:
    """One round's bytes. sent: by ordered pair of member indices. binds: what is slowest, in words."""

    seconds: float
    shares: tuple[float, ...]
    binds: str
    sent: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpochForecast:
    """A predicted epoch, seconds. hidden: what of communication the calculation covers."""

    calculation: float
    communication: float
    hidden: float
    transfer: TransferForecast
    rtt: float
    samples: float

    @property
    def total(self) -> float:
        return self.calculation + self.communication - self.hidden

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    @property
    def granularity(self) -> float:
        return self.calculation / self.communication if self.communication else math.inf


def transfer(
    job: Workload, members: Sequence[PeerProfile], links: Mapping[tuple[int, int], LinkProfile]
) -> TransferForecast:
    """The transfer of one round. links: by ordered pair of member indices, where known."""
    n = len(members)
    if n < 2:
        return TransferForecast(0.0, (1.0,) * n, "nothing: one peer averages alone")
    capacities = [Capacity(member.up, member.down) for member in members]
    rates = {pair: link.rate for pair, link in links.items()}
    parts = shares(capacities, rates)
    own, back = job.contribution_bytes, job.result_bytes
    sent = {(i, j): own * parts[j] + back * parts[i] for i in range(n) for j in range(n) if i != j}
    table = costs(capacities, rates)
    if table is None:
        return TransferForecast(0.0, parts, "nothing that was measured", sent)
    seconds = (own + back) / 2 * float((table @ np.array(parts)).max())
    return TransferForecast(seconds, parts, _slowest(members, links, sent), sent)


def _slowest(
    members: Sequence[PeerProfile],
    links: Mapping[tuple[int, int], LinkProfile],
    sent: Mapping[tuple[int, int], float],
) -> str:
    """What takes longest to carry its bytes, in words."""
    bounds = [
        (sent[i, j] / link.rate, f"the link {members[i].name} to {members[j].name}", link.rate)
        for (i, j), link in links.items()
    ]
    for i, member in enumerate(members):
        out = sum(count for (src, _), count in sent.items() if src == i)
        into = sum(count for (_, dst), count in sent.items() if dst == i)
        for rate, count, way in ((member.up, out, "sends"), (member.down, into, "receives")):
            if rate:
                bounds.append((count / rate, f"what {member.name} {way}", rate))
    _, what, rate = max(bounds)
    return f"{what} ({8e-6 * rate:,.4g} Mb/s)"


def furthest(links: Mapping[tuple[int, int], LinkProfile]) -> float:
    """The longest round trip, seconds."""
    return max((link.rtt for link in links.values()), default=0.0)


def epoch(
    job: Workload,
    members: Sequence[PeerProfile],
    links: Mapping[tuple[int, int], LinkProfile],
    overheads: Overheads = Overheads(),
) -> EpochForecast:
    """One epoch of a swarm of these members."""
    calculation = job.target / sum(member.sps for member in members)
    moved = transfer(job, members, links)
    rtt = furthest(links)
    communication = overheads.update
    if len(members) > 1:
        communication += overheads.local + overheads.round_trips * rtt + moved.seconds
    hidden = min(calculation, communication) if job.delayed else 0.0
    return EpochForecast(calculation, communication, hidden, moved, rtt, job.target)


def smallest_target(
    job: Workload, members: Sequence[PeerProfile], found: EpochForecast, efficiency: float
) -> float:
    """The target batch at which calculation is `efficiency` of the epoch."""
    speed = sum(member.sps for member in members)
    needed = found.communication * (1.0 if job.delayed else efficiency / (1 - efficiency))
    return speed * needed


def dollars_per_hour(
    found: EpochForecast, members: Sequence[PeerProfile], per_gb: Mapping[tuple[str, str], float]
) -> tuple[float, float]:
    """(rent, traffic) in dollars an hour. per_gb: dollars for 1e9 bytes from one region to another."""
    rent = sum(member.dollars_hour for member in members)
    per_epoch = sum(
        count / 1e9 * per_gb.get((members[i].region, members[j].region), 0.0)
        for (i, j), count in found.transfer.sent.items()
    )
    return rent, per_epoch * HOUR / found.total


def dollars_per_million(found: EpochForecast, dollars_hour: float) -> float:
    """Dollars for a million samples."""
    return dollars_hour / HOUR / found.samples_per_second * 1e6
