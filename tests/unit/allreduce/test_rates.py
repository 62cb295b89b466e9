"""The best rate of late is found from counters, and forgotten when the network changes."""

from __future__ import annotations

import pytest

from p2pavg.allreduce.rates import ROUNDS_KEPT, RateMeter


def run(meter: RateMeter, rate: float, seconds: float, start: float = 0.0) -> None:
    """One round at a steady rate, looked at every tenth of a second."""
    for tick in range(int(seconds * 10) + 1):
        meter.observe(start + tick / 10, int(rate * tick / 10))
    meter.round_over()


def test_a_steady_rate_is_found() -> None:
    """A round at 10 MB/s is measured as 10 MB/s."""
    meter = RateMeter()
    assert meter.bytes_per_second == 0.0
    run(meter, 1e7, 2.0)
    assert meter.bytes_per_second == pytest.approx(1e7, rel=0.01)


def test_waiting_does_not_lower_it() -> None:
    """Rounds that wait for others move less; the best window still counts."""
    meter = RateMeter()
    run(meter, 1e7, 1.0)
    run(meter, 2e6, 1.0)
    assert meter.bytes_per_second == pytest.approx(1e7, rel=0.01)


def test_old_rounds_are_forgotten() -> None:
    """A network that became slower is believed after some rounds."""
    meter = RateMeter()
    run(meter, 1e8, 1.0)
    for _ in range(ROUNDS_KEPT):
        run(meter, 2e6, 1.0)
    assert meter.bytes_per_second == pytest.approx(2e6, rel=0.01)


def test_tiny_rounds_tell_nothing() -> None:
    """A few kilobytes are no measurement of a network."""
    meter = RateMeter()
    run(meter, 1e4, 2.0)
    assert meter.bytes_per_second == 0.0


def test_an_idle_link_tells_nothing() -> None:
    """A link of which nothing waits is not slow: only windows in which more waited all the time count."""
    meter = RateMeter()
    for tick in range(20):
        meter.observe(tick / 10, int(1e5 * tick / 10), busy=False)
    assert meter.bytes_per_second == 0.0
    for tick in range(20, 40):
        meter.observe(tick / 10, int(1e7 * tick / 10), busy=tick % 10 > 2)
    assert meter.bytes_per_second == pytest.approx(1e7, rel=0.01)


def test_bursts_are_no_rate() -> None:
    """Bytes that come in one burst per round trip are spread over the window asked for."""
    meter = RateMeter()
    for tick in range(41):
        meter.observe(tick / 10, 1_000_000 * (tick // 5), least_s=1.0)
    assert meter.bytes_per_second == pytest.approx(2e6, rel=0.01)
