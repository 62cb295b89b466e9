"""Peers, links and overheads of a run, by its reports, for predictions. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, pstdev
from typing import TypeVar

from p2pavg import codecs
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.allreduce.rates import LEAST_BYTES, WINDOW_S
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.laws import (
    BYTES,
    CHUNK,
    FRAME_BYTES,
    INITIAL_WINDOW,
    PAYLOAD,
    LinkProfile,
    Overheads,
    PeerProfile,
    Swarm,
    Workload,
    epoch,
    transfer,
    value_bytes,
)
from p2pavg.identity import SHORT_ID_DIGITS
from p2pavg.report import LinkReport, MemoryReport, RoundReport
from p2pavg.report.distance import Distance

K = TypeVar("K", int, str, tuple[int, int])
V = TypeVar("V")
FEW = 5  # epochs below which an interval is doubled
Z80 = 1.2816  # of a normal distribution: 80% lie within
_WIDEST = 0.35
_CORRECTIONS = 10
_MEASURED = (
    *("epoch", "samples", "local_samples", "bytes_sent", "state_bytes", "seconds_total"),
    *("seconds_calculation", "seconds_transfer", "seconds_commit"),
)
_OF_A_LINK = ("bytes_sent", "bytes_received", "streams", "rtt_s", "window_bytes", "rate_bps")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A swarm as its reports show it. seconds: of each epoch that was looked at. outer: by outer steps.
    discarded: of what peers trained on, the share that is in no average. state: bytes of what newcomers
    download; 0: no report tells.
    """

    job: Workload
    swarm: Swarm
    overheads: Overheads
    seconds: tuple[float, ...]
    outer: bool = False
    discarded: float = 0.0
    state: int = 0

    @property
    def half_width(self) -> float:
        """Of the 80% interval of a prediction, as a share of it; wider with few epochs."""
        return Z80 * self.overheads.relative * (1.0 if len(self.seconds) >= FEW else 2.0)

    def speed_of(self, kind: str) -> float | None:
        """Samples/s of a peer of this type: the median of `of`. None: there is none."""
        found = [member.sps for member in self.of(kind)]
        return median(found) if found else None

    def memory_of(self, kind: str) -> MemoryReport:
        """What a peer of this type takes and has; where nobody reports one, the least that any peer takes."""
        if found := self.of(kind):
            return together([member.memory for member in found])
        told = [member.memory for member in self.swarm.members]
        return MemoryReport(
            host_peak=_least(one.host_peak for one in told),
            device_peak=_least(one.device_peak for one in told),
        )

    def of(self, kind: str) -> list[PeerProfile]:
        """The peers of a type such as "T4": those that report a device of all its words, such as "Tesla
        T4".
        """
        wanted = _words(kind)
        return [member for member in self.swarm.members if wanted and wanted <= _words(member.device)]


def from_reports(reports: Sequence[RoundReport]) -> Evidence:
    """Read the rounds of one run. The first epoch is left out where there are more, since peers join in it.

    Raises ConfigurationError when no round was committed, or nobody reports what it counted.
    """
    rounds = [
        report for report in reports if report.members and report.seconds_total != 0 and report.samples != 0
    ]
    for report in rounds:
        told = [("", name, getattr(report, name)) for name in _MEASURED]
        told += [
            (f"the link to {link.peer[:SHORT_ID_DIGITS]}: ", name, getattr(link, name))
            for link in report.links
            for name in _OF_A_LINK
        ]
        for where, name, value in told:
            if value < 0:
                raise ConfigurationError(
                    f"epoch {report.epoch} of peer {report.peer[:SHORT_ID_DIGITS]}: {where}{name} is below "
                    f"0: {value:g}"
                )
    if not rounds:
        raise ConfigurationError("no epoch of these reports ended with an average; let the run finish some")
    first = min(report.epoch for report in rounds)
    rounds = [report for report in rounds if report.epoch > first] or rounds
    full = max(len(report.members) for report in rounds)
    rounds = [report for report in rounds if len(report.members) == full]
    members, order = _members(rounds)
    codec = rounds[-1].codec if rounds[-1].codec in BYTES else "fp16"
    result = codecs.for_results(codecs.get(codec)).name
    job = Workload(
        target=_target(rounds),
        values=_values(rounds, codec, result, len(members)),
        contribution=codec,
        result=result,
        delayed=2 * sum(report.overlapped for report in rounds) > len(rounds),
        steps=float(_steps(rounds)),
    )
    swarm = _achieved(job, Swarm(members, _links(rounds, order)), rounds)
    seconds = tuple(_medians((report.epoch, report.seconds_total) for report in rounds).values())
    outer = any("theta_sha256_low" in report.extra for report in rounds)
    lost = sum(report.samples_discarded for report in rounds)
    discarded = lost / (lost + sum(report.local_samples for report in rounds))
    state = max(report.state_bytes for report in reports)
    return Evidence(job, swarm, _overheads(job, swarm, rounds), seconds, outer, discarded, state)


def together(told: Sequence[MemoryReport]) -> MemoryReport:
    """The most that any of these takes, and the least that one has."""
    return MemoryReport(
        host_peak=max(one.host_peak for one in told),
        host=_least(one.host for one in told),
        device_peak=max(one.device_peak for one in told),
        device=_least(one.device for one in told),
    )


def _least(sizes: Iterable[int]) -> int:
    """Of those that are known."""
    return min((size for size in sizes if size > 0), default=0)


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order of the keys."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return dict(sorted(found.items()))


def _medians(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    return {key: median(found) for key, found in _grouped(pairs).items()}


def _highest(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """What nine of ten do not exceed."""
    return {key: sorted(found)[-(len(found) + 9) // 10] for key, found in _grouped(pairs).items()}


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", text.lower()))


def _target(rounds: Sequence[RoundReport]) -> float:
    """Samples that peers train on in an epoch, those discarded included: who finds out that others had drawn
    the same has spent the time.
    """
    lost = _grouped((report.epoch, report.samples_discarded) for report in rounds)
    held = _grouped((report.epoch, report.samples) for report in rounds)
    return float(median(median(held[epoch]) + sum(lost[epoch]) for epoch in held))


def _steps(rounds: Sequence[RoundReport]) -> int:
    """Samples of one step of every peer together, at most: what a peer counts in an epoch is whole steps."""
    counted: dict[str, int] = {}
    for report in rounds:
        for member in report.members:
            counted[member.peer] = math.gcd(counted.get(member.peer, 0), member.samples)
    return sum(counted.get(member.peer, 0) for member in rounds[-1].members)


def _members(rounds: Sequence[RoundReport]) -> tuple[tuple[PeerProfile, ...], dict[str, int]]:
    """Peers that reported, in the order of their ids; those only named are as fast as the others."""
    speeds = _grouped(
        (report.peer, (report.local_samples + report.samples_discarded) / report.seconds_calculation)
        for report in rounds
        if report.local_samples and report.seconds_calculation > 0
    )
    devices = {report.peer: report.device for report in rounds if report.local_samples}
    regions = {report.peer: report.region for report in rounds}
    memory = _grouped((report.peer, report.memory) for report in rounds)
    latest = rounds[-1].members
    names = sorted({member.peer for member in latest if member.voter} | speeds.keys())
    if not speeds:
        raise ConfigurationError(
            "these reports name no samples of any peer, so no speed can be read from them"
        )
    usual = median(median(found) for found in speeds.values())
    members = tuple(
        PeerProfile(
            name[:SHORT_ID_DIGITS],
            regions.get(name, ""),
            median(speeds[name]) if name in speeds else usual,
            device=devices.get(name, ""),
            memory=together(memory.get(name, [MemoryReport()])),
        )
        for name in names
    )
    return members, {name: index for index, name in enumerate(names)}


def _links(rounds: Sequence[RoundReport], order: Mapping[str, int]) -> dict[tuple[int, int], LinkProfile]:
    """Rates of links are what the sender measured, or the receiver where that one does not report: the
    highest of most epochs, since in some a link waits for what others bring. Round trips are the shortest of
    the run: others have the queues of a transfer in them.
    """
    ways = [
        (way, link, _tells(link, report))
        for report in rounds
        for link in report.links
        if report.peer in order and link.peer in order and link.rate_bps > 0
        for here, there in [(order[report.peer], order[link.peer])]
        for way in ((here, there), (there, here))
    ]
    trips = _grouped((way, link.rtt_s) for way, link, _ in ways if link.rtt_s > 0)
    streams = _medians((way, max(1, link.streams)) for way, link, _ in ways)
    on_host = {way for way, link, _ in ways if link.distance is Distance.HOST}
    seen = _highest((way, link.rate_bps / 8) for way, link, _ in ways)
    rates = _highest((way, link.rate_bps / 8) for way, link, told in ways if told)
    window = max((link.window_bytes for _, link, told in ways if told or not rates), default=0)
    found = {}
    for way, rate in (seen | rates).items():
        trip, count = min(trips.get(way, [0.0])), round(streams[way])
        if way not in rates:  # as fast as its ends are with others, if windows let it be
            ends = (max(one for pair, one in seen.items() if pair[end] == way[end]) for end in (0, 1))
            rate = max(rate, min(*ends, count * window / trip if trip and window else math.inf))
        found[way] = LinkProfile(trip, rate, count, way in on_host)
    return found


def _tells(link: LinkReport, report: RoundReport) -> bool:
    """Whether a link's rate is one: bytes that streams send in their first round trip, or within a window in
    which rounds measure, leave at the pace of latency and slow start, however fast the link is. So do those
    of a transfer that lasts no longer than the furthest member's first results take.
    """
    rate, furthest = link.rate_bps / 8, max(other.rtt_s for other in report.links)
    moved = min(max(link.bytes_sent, link.bytes_received), rate * report.seconds_transfer)  # no heartbeats
    enough = max(LEAST_BYTES, max(1, link.streams) * INITIAL_WINDOW)
    return moved >= enough and moved >= rate * max(WINDOW_S, 2 * furthest)


def _achieved(job: Workload, swarm: Swarm, rounds: Sequence[RoundReport]) -> Swarm:
    """The links at rates with which the rounds' bytes take as long as they took.

    The rate of a report is the highest of an epoch, a sum of what each stream got at its best: more than a
    whole round gets. Where bytes are few beside round trips, they say nothing of rates.
    """
    took = median(report.seconds_transfer for report in rounds) - Overheads().transfer * swarm.rtt
    links, sent = swarm.links, transfer(job, swarm).sent
    if max((sent[way] / links[way].rate for way in sent.keys() & links.keys()), default=0.0) < swarm.rtt:
        return swarm
    for _ in range(_CORRECTIONS):  # slow start takes no longer over a slower link: one step is too short
        told = transfer(job, swarm).seconds
        if told >= took:
            break
        slower = {way: replace(link, rate=link.rate * told / took) for way, link in swarm.links.items()}
        swarm = replace(swarm, links=slower)
    return swarm


def _values(rounds: Sequence[RoundReport], codec: str, result: str, members: int) -> float:
    """Values of the vector, from the bytes that a flat butterfly of so many members sends in all."""
    if members < 2:
        return 0.0
    values, chunk = 0.0, CHUNK
    for _ in range(2):  # how long chunks are follows from the values
        each = value_bytes(codec, chunk) + value_bytes(result, chunk)
        sent = [
            mean(found)
            for found in _grouped((r.epoch, _of_averages(r, each, chunk)) for r in rounds).values()
        ]
        values = median(sent) / (each * (members - 1) / members)
        chunk = chunk_elements([round(values / members)] * members)
    return values


def _of_averages(report: RoundReport, each: float, chunk: int) -> float:
    """Bytes of the frames in which a peer sent contributions and results; where a report does not tell them
    apart, of all its frames. each: of a value, both ways, in chunks of so many.
    """
    encoded = sum(report.bytes_by_stage.values())
    return encoded * each / (each - 2 * FRAME_BYTES / chunk) if encoded else report.bytes_sent


def _overheads(job: Workload, swarm: Swarm, rounds: Sequence[RoundReport]) -> Overheads:
    """Phases in round trips where those are long enough to count in, and what is left in seconds."""
    usual = Overheads(update=median(report.seconds_update for report in rounds))
    phases = ("waiting", "matchmaking", "transfer", "commit")
    spent = sum(median(getattr(report, f"seconds_{phase}") for report in rounds) for phase in phases)
    spent = max(0.0, spent - transfer(job, swarm).seconds)
    known = usual.round_trips * swarm.rtt
    share = min(1.0, spent / known) if known else 1.0
    trips = {phase: share * getattr(usual, phase) for phase in phases}
    found = replace(usual, **trips, local=max(0.0, spent - known))
    predicted = epoch(job, swarm, found).total
    off = [report.seconds_total / predicted - 1 for report in rounds]
    relative = min(_WIDEST, max(0.01, pstdev(off) if len(off) > 1 else usual.relative))
    chunk = chunk_elements([round(job.values / len(swarm.members))] * len(swarm.members))
    each = value_bytes(job.contribution, chunk) + value_bytes(job.result, chunk)
    beside = _medians(  # of each peer: who can be dialled introduces others, and sends more than most
        (
            report.peer,
            (report.wire_bytes_sent - _of_averages(report, each, chunk) / PAYLOAD)
            / (len(report.links) * report.seconds_total),
        )
        for report in rounds
        if report.links and report.wire_bytes_sent
    )
    return replace(found, relative=relative, beside=max(0.0, mean([*beside.values()] or [0.0])))
