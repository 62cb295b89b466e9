"""The lab's counters: differences, lateness, and when a run is void."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.lab.stats import BOUNDS_US, LabStats, PathCounters, bucket_percentile, share_above


def counts(**by_bound: int) -> tuple[int, ...]:
    """Buckets from us_BOUND=count."""
    return tuple(by_bound.get(f"us_{bound}", 0) for bound in (*BOUNDS_US, "more"))


def stats(**changes: object) -> LabStats:
    base = LabStats(
        seconds=10.0,
        cpu_s=1.0,
        run_queue_s=0.0,
        kernel_drops=0,
        write_errors=0,
        priority="fifo",
        late=counts(us_50=1000),
        turns=counts(us_50=1000),
        paths={("a", "b"): PathCounters(sent_packets=10, sent_bytes=1000)},
        settings={},
    )
    return replace(base, **changes)


def test_percentiles_are_upper_bounds_of_their_bucket() -> None:
    """A percentile of lateness is the bound of the bucket in which it falls; without samples it is 0."""
    late = counts(us_50=98, us_1000=1, us_20000=1)
    assert bucket_percentile(late, 50) == 50
    assert bucket_percentile(late, 99) == 1000
    assert bucket_percentile(late, 100) == 20000
    assert bucket_percentile(counts(), 99) == 0


def test_share_above_counts_only_what_is_surely_later() -> None:
    """Only buckets that lie wholly above the tolerance count as late."""
    late = counts(us_1000=5, us_2000=3, us_more=2)
    assert share_above(late, 1000) == 0.5
    assert share_above(late, 2000) == 0.2


@pytest.mark.parametrize(
    ("late", "rtt_ms", "void"),
    [
        (counts(us_50=990, us_2000=10), 0.4, False),
        (counts(us_50=980, us_2000=20), 0.4, True),
        (counts(us_50=980, us_2000=20), 300, False),
        (counts(us_50=980, us_10000=20), 300, True),
    ],
)
def test_a_late_router_makes_a_run_void(late: tuple[int, ...], rtt_ms: float, void: bool) -> None:
    """More than 1 % of deliveries later than 1 ms, or 1 % of a longer round trip, are void."""
    assert (stats(late=late).void_reason(rtt_ms) is not None) == void
    assert (stats(turns=late).void_reason(rtt_ms) is not None) == void


def test_packets_lost_by_the_machine_make_a_run_void() -> None:
    """A packet that the kernel dropped, or did not take, is a loss that no topology asked for."""
    assert stats().void_reason(1) is None
    assert "dropped 3" in (stats(kernel_drops=3).void_reason(1) or "")
    assert "handed" in (stats(write_errors=1).void_reason(1) or "")


def test_since_subtracts_every_counter() -> None:
    """The difference of two moments has what happened between them."""
    later = stats(
        seconds=14.0,
        cpu_s=1.5,
        late=counts(us_50=1000, us_2000=7),
        paths={("a", "b"): PathCounters(sent_packets=15, sent_bytes=1700, lost_packets=2)},
    )
    passed = later.since(stats())
    assert passed.seconds == pytest.approx(4.0)
    assert passed.cpu_s == pytest.approx(0.5)
    assert passed.late == counts(us_2000=7)
    assert passed.paths["a", "b"] == PathCounters(sent_packets=5, sent_bytes=700, lost_packets=2)
