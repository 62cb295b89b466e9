"""Peers, links and overheads of a run, by its reports, for predictions. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, pstdev
from typing import TypeVar

from p2pavg import codecs
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.laws import (
    BYTES,
    CHUNK,
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
from p2pavg.report import MemoryReport, RoundReport

K = TypeVar("K", int, str, tuple[int, int])
V = TypeVar("V")
FEW = 5  # epochs below which an interval is doubled
Z80 = 1.2816  # of a normal distribution: 80% lie within
_WIDEST = 0.35
_CORRECTIONS = 10
_MEASURED = (
    *("samples", "local_samples", "bytes_sent", "seconds_total"),
    *("seconds_calculation", "seconds_transfer", "seconds_commit"),
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A swarm as its reports show it. seconds: of each epoch that was looked at. outer: by outer steps."""

    job: Workload
    swarm: Swarm
    overheads: Overheads
    seconds: tuple[float, ...]
    outer: bool = False

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
    for report, name in itertools.product(rounds, _MEASURED):
        if getattr(report, name) < 0:
            raise ConfigurationError(
                f"epoch {report.epoch} of peer {report.peer[:SHORT_ID_DIGITS]}: {name} is below 0: "
                f"{getattr(report, name):g}"
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
        target=float(median(report.samples for report in rounds)),
        values=_values(rounds, codec, result, len(members)),
        contribution=codec,
        result=result,
        delayed=2 * sum(report.overlapped for report in rounds) > len(rounds),
        steps=float(_steps(rounds)),
    )
    swarm = _achieved(job, Swarm(members, _links(rounds, order)), rounds)
    seconds = tuple(map(median, _grouped((report.epoch, report.seconds_total) for report in rounds).values()))
    outer = any("theta_sha256_low" in report.extra for report in rounds)
    return Evidence(job, swarm, _overheads(job, swarm, rounds), seconds, outer)


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


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", text.lower()))


def _steps(rounds: Sequence[RoundReport]) -> int:
    """Samples of one step of every peer together, at most: what a peer counts in an epoch is whole steps."""
    counted: dict[str, int] = {}
    for report in rounds:
        for member in report.members:
            counted[member.peer] = math.gcd(counted.get(member.peer, 0), member.samples)
    return sum(counted.get(member.peer, 0) for member in rounds[-1].members)


def _members(rounds: Sequence[RoundReport]) -> tuple[tuple[PeerProfile, ...], dict[str, int]]:
    """Peers that reported, in the order of their ids; those only named are as fast as the others."""
    counted = [report for report in rounds if report.local_samples and report.seconds_calculation > 0]
    speeds = _grouped((report.peer, report.local_samples_per_second) for report in counted)
    devices = {report.peer: report.device for report in counted}
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
    """Rates of links are what the sender measured, or the receiver where that one does not report. Round
    trips are the shortest of the run: others have the queues of a transfer in them.
    """
    ways = [
        (way, link)
        for report in rounds
        for link in report.links
        if report.peer in order and link.peer in order
        for here, there in [(order[report.peer], order[link.peer])]
        for way in ((here, there), (there, here))
    ]
    trips = _grouped((way, link.rtt_s) for way, link in ways if link.rtt_s > 0)
    streams = _grouped((way, max(1, link.streams)) for way, link in ways if link.rate_bps > 0)
    rates = _grouped((way, link.rate_bps / 8) for way, link in ways if link.rate_bps > 0)
    return {
        way: LinkProfile(min(trips.get(way, [0.0])), median(found), round(median(streams[way])))
        for way, found in rates.items()
    }


def _achieved(job: Workload, swarm: Swarm, rounds: Sequence[RoundReport]) -> Swarm:
    """The links at rates with which the rounds' bytes take as long as they took.

    The rate of a report is the highest of an epoch, a sum of what each stream got at its best: more than a
    whole round gets. Where bytes are few beside round trips, they say nothing of rates.
    """
    took = median(report.seconds_transfer for report in rounds) - Overheads().transfer * swarm.rtt
    if transfer(job, swarm).seconds < swarm.rtt:
        return swarm
    for _ in range(_CORRECTIONS):  # slow start takes no longer over a slower link: one step is too short
        told = transfer(job, swarm).seconds
        if told >= took:
            break
        slower = {pair: replace(link, rate=link.rate * told / took) for pair, link in swarm.links.items()}
        swarm = replace(swarm, links=slower)
    return swarm


def _values(rounds: Sequence[RoundReport], codec: str, result: str, members: int) -> float:
    """Values of the vector, from the bytes that a flat butterfly of so many members sends in all."""
    if members < 2:
        return 0.0
    sent = [mean(found) for found in _grouped((r.epoch, r.bytes_sent) for r in rounds).values()]
    chunk = CHUNK
    for _ in range(2):  # how long chunks are follows from the values
        each = (value_bytes(codec, chunk) + value_bytes(result, chunk)) * (members - 1) / members
        values = median(sent) / each
        chunk = chunk_elements([round(values / members)] * members)
    return values


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
    return replace(found, relative=relative)
