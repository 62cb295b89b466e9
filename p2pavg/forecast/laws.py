"""How long an epoch takes, and what it costs: the laws, as functions of speeds, links and prices. Pure.

An epoch is calculation, samples over the sum of local speeds, and communication: a few round trips of the
furthest member, and the transfer, S·max(costs · shares), by the plan and the shares that a leader would
choose (`allreduce.choosing`), and the ramp of slow start. Constants in round trips were measured on emulated
links (docs/forecast.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.choosing import PlanInputs, Topology, choose
from p2pavg.allreduce.loads import Capacity, link_rates
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.allreduce.regions import regions
from p2pavg.report import MemoryReport

CHUNK = 128 * 1024  # values, of long vectors
FRAME_BYTES = 40  # of a chunk's header on the wire
PAYLOAD = 1448 / 1500  # of the bytes that a path carries: TCP's and IP's headers take the rest


def value_bytes(codec: str, chunk: int = CHUNK) -> float:
    """Bytes of a value on the wire, in chunks of so many."""
    return (codecs.get(codec).encoded_size(chunk) + FRAME_BYTES) / chunk


BYTES = {name: value_bytes(name) for name in codecs.WIRE_IDS}
"""Of a long vector, by codec."""
HOUR = 3600.0
WORD = 2.0  # round trips of word that the next target is reached, over links that a longer round has filled
INITIAL_WINDOW = 10 * 1448  # bytes that a stream sends in its first round trip (RFC 6928)


@dataclass(frozen=True, slots=True)
class PeerProfile:
    """A peer. sps: samples/s between two rounds. Rates in bytes/s, None: no limit of its own. device: what it
    calculates on, where that is known; memory: what it takes of it at most, and has.
    """

    name: str
    region: str
    sps: float
    up: float | None = None
    down: float | None = None
    dollars_hour: float = 0.0
    device: str = ""
    memory: MemoryReport = field(default_factory=MemoryReport)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Between two peers, one way. rtt in seconds, rate in bytes/s over all streams, of which there are
    `streams`. on_host: both are on one machine, and no traffic leaves it.
    """

    rtt: float
    rate: float
    streams: int = 16
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Swarm:
    """Peers, and the links between them: by ordered pair of their indices, where known."""

    members: Sequence[PeerProfile]
    links: Mapping[tuple[int, int], LinkProfile]

    @property
    def sps(self) -> float:
        """Samples/s between two rounds."""
        return sum(member.sps for member in self.members)

    @property
    def rtt(self) -> float:
        """The longest round trip, seconds."""
        return max((link.rtt for link in self.links.values()), default=0.0)

    def only(self, kept: Sequence[int]) -> Swarm:
        """The swarm of these members."""
        place = {old: new for new, old in enumerate(kept)}
        links = {(place[i], place[j]): k for (i, j), k in self.links.items() if i in place and j in place}
        return Swarm([self.members[i] for i in kept], links)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What an epoch takes beside calculation and bytes: round trips of the furthest member, and seconds.

    waiting to transfer are counted in round trips; `local` is what is left at a round trip of zero, and
    `update` is decoding and the optimizer's step. beside: bytes/s over each link beside averages', such as
    heartbeats and acknowledgements. relative: standard deviation of a prediction, as a share.
    """

    waiting: float = 0.76
    matchmaking: float = 1.0
    transfer: float = 1.2
    commit: float = 0.9
    local: float = 0.02
    update: float = 0.0
    beside: float = 0.0
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
    steps: float = 0.0

    @property
    def nbytes(self) -> float:
        """Of the encoded vector, one way: the mean of contribution and result."""
        return self.values * (BYTES[self.contribution] + BYTES[self.result]) / 2


@dataclass(frozen=True, slots=True)
class TransferForecast:
    """One round's bytes. sent: by ordered pair of member indices. binds: what is slowest, in words. plan: as
    reports name it.
    """

    seconds: float
    shares: tuple[float, ...]
    binds: str
    sent: Mapping[tuple[int, int], float] = field(default_factory=dict)
    plan: str = "flat"


@dataclass(frozen=True, slots=True)
class EpochForecast:
    """A predicted epoch, seconds. hidden: what of communication the calculation covers. wire: IP bytes by
    ordered pair of member indices.
    """

    calculation: float
    communication: float
    hidden: float
    transfer: TransferForecast
    rtt: float
    samples: float
    wire: Mapping[tuple[int, int], float]

    @property
    def total(self) -> float:
        return self.calculation + self.communication - self.hidden

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    @property
    def granularity(self) -> float:
        return self.calculation / self.communication if self.communication else math.inf

    def to_dict(self, dollars_hour: float | None) -> dict[str, Any]:
        """What scripts are told. dollars_hour: None: nobody told prices."""
        return {
            "samples_per_second": self.samples_per_second,
            "epoch_s": self.total,
            "calculation_s": self.calculation,
            "communication_s": self.communication,
            "hidden_s": self.hidden,
            "granularity": self.granularity if self.communication else None,
            "dollars_per_hour": dollars_hour,
            "dollars_per_million": None if dollars_hour is None else dollars_per_million(self, dollars_hour),
            "binds": self.transfer.binds,
            "plan": self.transfer.plan,
        }


def transfer(job: Workload, swarm: Swarm, plan: Topology = Topology.AUTO) -> TransferForecast:
    """The transfer of one round, by the plan that its leader would choose."""
    members, links, n = swarm.members, swarm.links, len(swarm.members)
    if n < 2:
        return TransferForecast(0.0, (1.0,) * n, "nothing: one peer averages alone")
    groups = regions([member.region for member in members], {pair: link.rtt for pair, link in links.items()})
    near = [link.rtt for (i, j), link in links.items() if groups[i] == groups[j]]
    question = PlanInputs(
        numel=max(n, round(job.values)),
        nbytes=round(job.nbytes),
        members=[Capacity(member.up, member.down) for member in members],
        links=link_rates(n, {pair: link.rate for pair, link in links.items()}),
        groups=groups,
        near_rtt_s=max(near, default=0.0),
        votes=[True] * n,
    )
    chosen = choose(plan, question)
    chunk = chunk_elements([part.count for part in chosen.plan.parts])
    own, back = (job.values * value_bytes(codec, chunk) for codec in (job.contribution, job.result))
    sent: dict[tuple[int, int], float] = {}
    contributed: dict[tuple[int, int], float] = {}
    parts = [0.0] * n
    for index, part in enumerate(chosen.plan.parts):
        share = part.count / question.numel
        parts[part.owner] += share
        for rank, other in chosen.plan.ways(index, n):
            contributed[rank, other] = contributed.get((rank, other), 0.0) + own * share
            sent[rank, other] = sent.get((rank, other), 0.0) + own * share
            sent[other, rank] = sent.get((other, rank), 0.0) + back * share
    if chosen.seconds is None:
        return TransferForecast(0.0, tuple(parts), "nothing that was measured", sent, chosen.plan.kind)
    ramped, binds = _slowest(swarm, sent)
    behind = _results_behind(swarm, contributed, chunk * value_bytes(job.result, chunk))
    seconds = max(chosen.seconds, ramped, behind)
    return TransferForecast(seconds, tuple(parts), binds, sent, chosen.plan.kind)


def ramp(link: LinkProfile, count: float, rate: float = math.inf) -> float:
    """Seconds that slow start adds to `count` bytes: streams that were idle begin with the initial window
    again (RFC 5681, 4.1) and double it every round trip, until they fill the link or all is sent. rate: that
    the bytes have, where something else than the link is slower.
    """
    rate = min(rate, link.rate)
    risen = min(count, rate * link.rtt)
    return max(0.0, link.rtt * math.log2(1 + risen / (link.streams * INITIAL_WINDOW)) - risen / rate)


def _results_behind(swarm: Swarm, contributed: Mapping[tuple[int, int], float], chunk_bytes: float) -> float:
    """Seconds until the last results have come over a link that carries contributions alone the other way.

    Streams carry a chunk each at once, all of which end together: so many results are left when the last
    contributions have come. A link that carries both kinds both ways has others to send before.
    """
    found = 0.0
    for (rank, owner), count in contributed.items():
        there, back = swarm.links.get((rank, owner)), swarm.links.get((owner, rank))
        if there and back:
            last = min(count, chunk_bytes * back.streams)
            found = max(found, count / there.rate + ramp(there, count) + last / back.rate)
    return found


def _slowest(swarm: Swarm, sent: Mapping[tuple[int, int], float]) -> tuple[float, str]:
    """What takes longest to carry its bytes, its slow start included: seconds, and in words."""
    members, links, bounds = swarm.members, swarm.links, []
    for (i, j), count in sent.items():
        if (i, j) in links:
            link = links[i, j]
            seconds = count / link.rate + ramp(link, count)
            bounds.append((seconds, f"the link {members[i].name} to {members[j].name}", link.rate))
    for end, way in enumerate(("sends", "receives")):
        cards = [member.down if end else member.up for member in members]
        whole, risen = [0.0] * len(members), [0.0] * len(members)
        for pair, count in sent.items():
            whole[pair[end]] += count
        for pair, count in sent.items():
            card = cards[pair[end]]
            if card and count and pair in links:
                slow_start = ramp(links[pair], count, card * count / whole[pair[end]])
                risen[pair[end]] = max(risen[pair[end]], slow_start)
        bounds += [
            (total / card + late, f"what {member.name} {way}", card)
            for member, card, total, late in zip(members, cards, whole, risen, strict=True)
            if card
        ]
    seconds, what, rate = max(bounds)
    return seconds, f"{what} ({8e-6 * rate:,.4g} Mb/s)"


def epoch(
    job: Workload, swarm: Swarm, overheads: Overheads = Overheads(), plan: Topology = Topology.AUTO
) -> EpochForecast:
    """One epoch of a swarm."""
    calculation = job.target / swarm.sps
    moved = transfer(job, swarm, plan)
    communication = overheads.update
    if len(swarm.members) > 1:
        communication += overheads.local + overheads.round_trips * swarm.rtt + moved.seconds
    hidden = min(calculation, communication) if job.delayed else 0.0
    waits = max(0.0, communication - calculation) if job.delayed else 0.0
    samples = job.target + swarm.sps * min(waits, WORD * swarm.rtt)
    beside = overheads.beside * (calculation + communication - hidden)
    wire = {
        pair: moved.sent.get(pair, 0.0) / PAYLOAD + beside
        for pair in permutations(range(len(swarm.members)), 2)
    }
    return EpochForecast(calculation, communication, hidden, moved, swarm.rtt, samples, wire)


def smallest_target(swarm: Swarm, found: EpochForecast, efficiency: float | None = None) -> float:
    """The target batch at which calculation is `efficiency` of the epoch; None: at which it hides all
    communication, with delayed updates.
    """
    return swarm.sps * found.communication * (efficiency / (1 - efficiency) if efficiency else 1.0)


def dollars_per_hour(
    found: EpochForecast, swarm: Swarm, per_gb: Mapping[tuple[str, str], float]
) -> tuple[float, float]:
    """(rent, traffic) in dollars an hour. per_gb: dollars for 1e9 bytes from one region to another."""
    members, links = swarm.members, swarm.links
    rent = sum(member.dollars_hour for member in members)
    per_epoch = sum(
        count / 1e9 * per_gb.get((members[i].region, members[j].region), 0.0)
        for (i, j), count in found.wire.items()
        if (i, j) not in links or not links[i, j].on_host
    )
    return rent, per_epoch * HOUR / found.total


def dollars_per_million(found: EpochForecast, dollars_hour: float) -> float:
    """Dollars for a million samples."""
    return dollars_hour / HOUR / found.samples_per_second * 1e6
