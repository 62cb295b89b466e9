"""The laws of an epoch, and what reports say of their constants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from p2pavg.allreduce.choosing import Topology
from p2pavg.allreduce.partition import chunk_elements
from p2pavg.errors import ConfigurationError
from p2pavg.forecast.evidence import from_reports
from p2pavg.forecast.laws import (
    BYTES,
    INITIAL_WINDOW,
    WORD,
    LinkProfile,
    Overheads,
    PeerProfile,
    Swarm,
    Workload,
    dollars_per_hour,
    dollars_per_million,
    epoch,
    ramp,
    smallest_target,
    transfer,
    value_bytes,
)
from p2pavg.report import LinkReport, MemoryReport
from tests.forecast.swarms import report, reports


def pair(rate: float = 1e8, rtt: float = 0.1) -> Swarm:
    members = [PeerProfile("a", "us", 60.0, dollars_hour=1.0), PeerProfile("b", "eu", 40.0, dollars_hour=2.0)]
    return Swarm(members, {(0, 1): LinkProfile(rtt, rate), (1, 0): LinkProfile(rtt, rate)})


def test_two_peers_exchange_the_vector_once_each_way() -> None:
    """Half of a contribution and half of a result in each direction: S bytes over the link's rate."""
    swarm = pair(rtt=0.0)
    found = transfer(Workload(1, 1_024_000), swarm)
    assert found.shares == pytest.approx((0.5, 0.5))
    each = value_bytes(
        "fp16", chunk_elements([512_000] * 2)
    )  # a short vector has short chunks, and more headers
    assert each > 1.001 * BYTES["fp16"]
    assert sum(found.sent.values()) == pytest.approx(2 * 1_024_000 * each)
    assert found.seconds == pytest.approx(1_024_000 * each / 1e8)
    assert "the link" in found.binds


def test_few_bytes_take_the_round_trips_of_slow_start() -> None:
    """Streams begin with ten segments each and double: 1 MB over 16 streams take log2(1 + 1 MB / 16 windows)
    round trips, and with many bytes only the way up to the link's rate is added.
    """
    link = LinkProfile(0.1, 1e8)
    for count in (1e4, 1e6):
        assert count / link.rate + ramp(link, count) == pytest.approx(
            0.1 * math.log2(1 + count / (16 * INITIAL_WINDOW)), rel=1e-6
        )
    full = ramp(link, 1e8)
    assert full == ramp(link, 1e9) == pytest.approx(0.1 * (math.log2(1 + 1e7 / (16 * INITIAL_WINDOW)) - 1))
    assert ramp(LinkProfile(0.1, 1e8, streams=64), 1e9) < full
    assert ramp(LinkProfile(0.0004, 1.25e8), 1e9) == 0.0
    swarm = pair()
    job = Workload(1, 1e8)
    assert transfer(job, swarm).seconds == pytest.approx(job.nbytes / 1e8 + full, rel=0.001)


def test_the_last_results_follow_the_last_contributions() -> None:
    """A peer behind thin links owns nothing: its links carry contributions one way and results the other. Of
    64 chunks of a part, 16 streams carry 16 at once, so a quarter of the results is left at the end.
    """
    members = [PeerProfile(name, "", 1.0) for name in "abc"]
    links = {
        (i, j): LinkProfile(0.0, 1e7 if 2 in (i, j) else 1e9) for i in range(3) for j in range(3) if i != j
    }
    found = transfer(Workload(1, 16_384_000), Swarm(members, links))
    assert found.shares == pytest.approx((0.5, 0.5, 0.0))
    assert found.seconds == pytest.approx(1.25 * found.sent[2, 0] / 1e7, rel=0.001)


def test_what_is_slowest_binds() -> None:
    """A home's upload is named, with its rate, and its owner is given less to reduce."""
    members = [PeerProfile("home", "", 1.0, up=2.5e6), PeerProfile("b", "", 1.0), PeerProfile("c", "", 1.0)]
    links = {(i, j): LinkProfile(0.04, 1e8) for i in range(3) for j in range(3) if i != j}
    found = transfer(Workload(1, 1e6), Swarm(members, links))
    assert found.binds == "what home sends (20 Mb/s)"
    assert found.shares[0] < 0.05


def test_the_plan_is_the_one_that_a_leader_would_choose() -> None:
    """Two regions of two peers: two levels send half of a flat plan's bytes between them, in less time."""
    members = [PeerProfile(f"{place}{n}", place, 1.0) for place in ("us", "eu") for n in (1, 2)]
    links = {
        (i, j): LinkProfile(0.0005, 1e9) if i // 2 == j // 2 else LinkProfile(0.1, 1e7)
        for i in range(4)
        for j in range(4)
        if i != j
    }
    job = Workload(1, 1e7)
    swarm = Swarm(members, links)
    auto, flat = transfer(job, swarm), transfer(job, swarm, Topology.FLAT)
    assert (auto.plan, flat.plan) == ("two-level", "flat")
    between = [
        sum(count for (i, j), count in found.sent.items() if i // 2 != j // 2) for found in (auto, flat)
    ]
    assert between[0] == pytest.approx(between[1] / 2, rel=0.01)
    assert sum(auto.sent.values()) == pytest.approx(sum(flat.sent.values()), rel=0.01)
    assert auto.seconds < 0.7 * flat.seconds


def test_an_epoch_is_calculation_round_trips_and_bytes() -> None:
    """Synchronous epochs add up; delayed ones hide what fits behind the calculation."""
    swarm = pair()
    over = Overheads(local=0.0, update=0.5)
    found = epoch(Workload(1000, 1e8), swarm, over)
    assert found.calculation == 10
    bytes_s = transfer(Workload(1000, 1e8), swarm).seconds
    assert found.communication == pytest.approx(0.5 + over.round_trips * 0.1 + bytes_s)
    assert found.total == pytest.approx(found.calculation + found.communication)
    assert epoch(Workload(1000, 1e8, delayed=True), swarm, over).total == pytest.approx(10)
    small = epoch(Workload(10, 1e8, delayed=True), swarm, over)
    assert small.total == pytest.approx(small.communication)
    assert small.samples == pytest.approx(
        10 + WORD * 0.1 * 100
    )  # counted until the word of the target arrives
    nearly = epoch(Workload(100 * (small.total - 0.01), 1e8, delayed=True), swarm, over)
    assert nearly.samples == pytest.approx(100 * nearly.total)


def test_a_peer_alone_moves_nothing() -> None:
    """One member has neither transfer nor round trips."""
    found = epoch(Workload(100, 1e9), Swarm([PeerProfile("a", "", 50.0)], {}), Overheads())
    assert (found.total, found.communication) == (2.0, 0.0)


def test_the_smallest_target_reaches_its_efficiency() -> None:
    """At the target batch that is told, calculation is that share of the epoch, to the digit."""
    swarm = pair()
    job = Workload(1000, 1e8)
    for efficiency in (0.8, 0.9, 0.95):
        target = smallest_target(swarm, epoch(job, swarm), efficiency)
        again = epoch(replace(job, target=target), swarm)
        assert again.calculation / again.total == pytest.approx(efficiency)


def test_dollars_are_rent_and_bytes_between_regions() -> None:
    """Rent by the hour, and what every epoch sends from region to region."""
    swarm = pair()
    found = epoch(Workload(1000, 1e9), swarm)
    rent, traffic = dollars_per_hour(found, swarm, {("us", "eu"): 0.08})
    assert rent == 3.0
    assert found.wire[0, 1] == pytest.approx(found.transfer.sent[0, 1] * 1500 / 1448)  # headers are paid for
    assert traffic == pytest.approx(found.wire[0, 1] / 1e9 * 0.08 * 3600 / found.total)
    per_million = dollars_per_million(found, rent + traffic)
    assert per_million == pytest.approx((rent + traffic) / 3600 / found.samples_per_second * 1e6)


def test_reports_are_foretold_by_themselves() -> None:
    """What evidence is read from reports predicts the epochs that they tell of, within their scatter."""
    evidence = from_reports(reports())
    found = epoch(evidence.job, evidence.swarm, evidence.overheads)
    assert found.total == pytest.approx(8.0, rel=0.02)
    assert found.calculation == pytest.approx(6.0)
    assert evidence.job.values * BYTES["fp16"] == pytest.approx(70e6, rel=0.01)
    assert {member.region for member in evidence.swarm.members} == {"us", "eu"}
    assert len(evidence.seconds) == 7
    assert 0 < evidence.half_width < 0.1


def test_rates_are_those_with_which_the_bytes_took_as_long_as_they_took() -> None:
    """The highest rate of an epoch promises more than a round gets; few bytes say nothing of rates."""
    told = reports()
    optimistic = [
        replace(one, links=tuple(replace(link, rate_bps=1.2e9) for link in one.links)) for one in told
    ]
    few = [replace(one, seconds_transfer=0.3, bytes_sent=700_000) for one in told]
    found = from_reports(optimistic)
    took = 1.6 - Overheads().transfer * 0.1
    assert transfer(found.job, found.swarm).seconds == pytest.approx(took, rel=0.01)
    assert from_reports(few).swarm.links[0, 1].rate == 4e8 / 8


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"bytes_sent": 50_000, "rate_bps": 8e6, "rtt_s": 0.0007}, 50e6),  # within one window of a round
        ({"bytes_sent": 400_000, "rate_bps": 40e6, "streams": 8}, 50e6),  # within two round trips
        ({"bytes_sent": 400_000, "rate_bps": 40e6, "streams": 4}, 40e6),  # so many windows a round trip
        ({"bytes_sent": 110_000, "rate_bps": 2e6, "streams": 8}, 50e6),  # what streams send at first
        ({"bytes_sent": 900_000, "rate_bps": 16e6, "rtt_s": 0.0007}, 50e6),  # others are two round trips away
        ({"bytes_sent": 9_000_000, "rate_bps": 8e6}, 1e6),  # a slow link
    ],
)
def test_a_link_that_carried_little_is_not_taken_for_a_slow_one(
    changes: dict[str, float], rate: float
) -> None:
    """Where latency and slow start decide how long bytes took, a link is as fast as its ends are with others,
    and as windows let it be.
    """

    def seen(peer: str, link: LinkReport) -> LinkReport:
        if int(peer, 16) + int(link.peer, 16) == 2:
            return replace(link, **changes)
        return replace(link, rtt_s=0.3 if "rtt_s" in changes else link.rtt_s)

    told = [replace(one, links=tuple(seen(one.peer, link) for link in one.links)) for one in reports(8, 4)]
    links = from_reports([replace(one, seconds_transfer=9.0) for one in told]).swarm.links
    assert links[0, 2].rate / links[0, 1].rate == pytest.approx(rate / 50e6)


def test_the_round_trip_of_a_link_is_the_shortest_that_was_seen() -> None:
    """What the queue of a transfer adds to a report's round trip is none of the link's."""
    told = [
        replace(one, links=tuple(replace(link, rtt_s=0.1 + 0.01 * one.epoch) for link in one.links))
        for one in reports()
    ]
    assert from_reports(told).swarm.links[0, 1].rtt == pytest.approx(
        0.11
    )  # of epoch 1: the first is left out


def test_a_type_has_the_speed_of_the_reports_that_name_it() -> None:
    """All words of the type are in the device's name; what nobody reports has no speed."""
    names = ("Tesla T4", "NVIDIA A100-SXM4-40GB")
    told = [
        replace(one, device=names[int(one.peer, 16)], local_samples=100 * (1 + int(one.peer, 16)))
        for one in reports()
    ]
    evidence = from_reports(told)
    assert evidence.speed_of("T4") == pytest.approx(100 / 6)
    assert evidence.speed_of("a100 40gb") == pytest.approx(200 / 6)
    assert [evidence.speed_of(kind) for kind in ("T", "A10", "V100", "", "A100 80GB")] == [None] * 5


def test_a_type_takes_the_memory_of_the_reports_that_name_it() -> None:
    """The highest peak and the least memory of its peers; another type takes the least of any, and what it
    has is unknown.
    """
    sizes = [MemoryReport(5, 90, 20, 50), MemoryReport(7, 80, 30, 40), MemoryReport(3, 70)]
    names = ("Tesla T4", "Tesla T4", "cpu")
    told = [
        replace(one, device=names[peer], memory=sizes[peer] if one.epoch < 5 else MemoryReport(1, 99, 1, 99))
        for one in reports(8, 3)
        for peer in [int(one.peer, 16)]
    ]
    evidence = from_reports(told)
    assert evidence.memory_of("T4") == MemoryReport(7, 80, 30, 40)
    assert evidence.memory_of("A10") == MemoryReport(3, 0, 1, 0)


def test_what_links_carry_beside_averages_is_foretold_and_paid_for() -> None:
    """Heartbeats and acknowledgements, as the reports count them, by pairs of peers and by time."""
    told = reports()
    assert from_reports(told).overheads.beside == 0.0  # reports that count no IP bytes
    frames = round(told[0].links[0].bytes_sent * 1500 / 1448)
    told = [replace(each, links=(replace(each.links[0], wire_bytes_sent=frames + 8_000),)) for each in told]
    evidence = from_reports(told)
    assert evidence.overheads.beside == pytest.approx(1000.0, rel=0.01)
    found = epoch(evidence.job, evidence.swarm, evidence.overheads)
    counted = 2 * told[0].wire_bytes_sent
    assert sum(found.wire.values()) == pytest.approx(counted, rel=0.01)


def test_few_epochs_give_a_wide_interval() -> None:
    """Below five epochs the interval is twice as wide as the same scatter would make it."""
    assert from_reports(reports(3)).half_width > 1.5 * from_reports(reports(9)).half_width


def test_a_joiner_and_smaller_rounds_do_not_count() -> None:
    """Rounds of fewer members than most are left out, and so is the first epoch."""
    told = [*reports(8, 3), report(20, 0, 2, seconds_total=99.0)]
    told.append(report(0, 1, 3, seconds_total=500.0))
    evidence = from_reports(told)
    assert len(evidence.swarm.members) == 3
    assert max(evidence.seconds) < 9


def test_samples_that_were_discarded_were_calculated() -> None:
    """Where peers draw what others have, averages hold less; predictions are of epochs in which none do."""
    plain, doubled = (
        from_reports(told)
        for told in (
            reports(),
            [replace(one, samples=120, local_samples=60, samples_discarded=40) for one in reports()],
        )
    )
    assert (plain.discarded, doubled.discarded) == (0.0, 0.4)
    assert doubled.swarm.sps == plain.swarm.sps
    assert doubled.job.target == plain.job.target


def test_reports_without_a_round_are_refused() -> None:
    """One sentence says that no epoch ended with an average."""
    with pytest.raises(ConfigurationError, match="no epoch"):
        from_reports([report(1, 0, 2, members=())])
    with pytest.raises(ConfigurationError, match="no epoch"):
        from_reports([report(e, 0, 2, samples=0) for e in range(4)])
    with pytest.raises(ConfigurationError, match="epoch 3 of peer 00000000: seconds_transfer is below 0: -1"):
        from_reports([report(e, 0, 2, seconds_transfer=2.0 - e) for e in range(4)])
    told = reports()
    links = tuple(replace(link, rate_bps=-1.0) for link in told[0].links)
    with pytest.raises(ConfigurationError, match="the link to 00000000: rate_bps is below 0: -1"):
        from_reports([replace(told[0], links=links), *told])
    with pytest.raises(ConfigurationError, match="no samples of any peer"):
        from_reports([report(e, 0, 2, local_samples=0) for e in range(4)])
