"""bench net: the law fitted to a sweep, rates out of samples, and the words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.bench.net.fit import (
    Fit,
    bytes_text,
    cold_gbps,
    doubt,
    explain,
    fit,
    is_full,
    rate_text,
    seconds_for,
    waited_share,
    warm_gbps,
)


def ramp(rate: float, start: float, end: float, step: float = 0.01) -> list[tuple[float, int]]:
    """Samples of a stream that receives `rate` bytes a second from `start` on."""
    return [(i * step, int(max(0.0, i * step - start) * rate)) for i in range(int(end / step) + 1)]


@given(
    one=st.floats(0.001, 2.0),
    rate_over_one=st.floats(1.2, 60.0),
    noise=st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8),
)
def test_a_noisy_law_is_found_again(one: float, rate_over_one: float, noise: list[float]) -> None:
    """From min(k w, rate) with 3 % noise, w and the rate are found within 4 %."""
    rate = one * rate_over_one
    points: dict[int, float] = {}
    for k, factor in zip((1, 2, 4, 8, 16, 32, 64, 128), noise, strict=True):
        points[k] = min(k * one, rate) * factor
        if len(points) > 2 and is_full(points):
            break
    found = fit(points, 0.1)
    assert found.rate_gbps == pytest.approx(rate, rel=0.04)
    assert found.filled
    if rate_over_one > 2.5:
        assert found.window_limited
        assert found.window_bytes == pytest.approx(one * 0.1 / 8e-9, rel=0.04)
        assert found.best_streams == pytest.approx(rate_over_one, abs=1 + 0.08 * rate_over_one)


def test_one_stream_that_fills_the_link_is_not_called_limited() -> None:
    """When more streams gain nothing, one is best and the window is only a lower bound."""
    found = fit({1: 0.941, 2: 0.944, 4: 0.938}, 0.02)
    assert found.best_streams == 1
    assert not found.window_limited
    assert found.filled
    assert explain(found, 4).startswith("One stream fills the link: 944 Mb/s")


def test_a_link_that_was_not_filled_is_said_to_be() -> None:
    """When the last doubling still doubled, the rate is a lower bound, and the words say so."""
    found = fit({1: 0.01, 2: 0.02, 4: 0.04}, 0.3)
    assert not found.filled
    assert found.rate_gbps == pytest.approx(0.04)
    assert "4 streams do not fill the link" in explain(found, 4)
    assert "at least 40 Mb/s" in explain(found, 4)


def test_streams_that_compete_do_not_lower_the_rate() -> None:
    """Too many streams may get less together than fewer did: the link's rate is what the best got."""
    assert fit({1: 0.09, 2: 0.18, 4: 0.36, 8: 0.7, 16: 0.965, 32: 0.6}, 0.3).rate_gbps == 0.965


def test_the_words_name_window_rtt_and_streams() -> None:
    """One sentence says what one stream gets, why, and how many fill the link."""
    found = Fit(0.3, 3.675e6, 0.98, 10, True, True)
    assert explain(found, 16) == (
        "One stream gets 98 Mb/s because 3.7 MB fit in flight over 300 ms; "
        "10 streams fill the link, which carries 980 Mb/s."
    )


@pytest.mark.parametrize("points", [{}, {1: 0.0}])
def test_nothing_received_is_no_fit(points: dict[int, float]) -> None:
    """Without a throughput above zero there is no law to fit."""
    with pytest.raises(ValueError, match="nothing"):
        fit(points, 0.1)


def test_a_link_is_full_when_streams_get_clearly_less_each() -> None:
    """Below four fifths of the best per-stream rate the sweep may stop; above it may not."""
    assert not is_full({1: 0.1})
    assert not is_full({1: 0.1, 2: 0.17})
    assert is_full({1: 0.1, 2: 0.2, 4: 0.3})
    assert not is_full({1: 0.1, 2: 0.2, 4: 0.1})  # a collapse says nothing about the link


def test_warm_rate_ignores_the_ramp_and_a_dip() -> None:
    """The steady rate is that of the last part, and one slice in which nothing came does not change it."""
    samples = ramp(1e8, 1.0, 3.0)
    assert warm_gbps(samples, 0.1, 1.0) == pytest.approx(0.8)
    dipped = [
        (at, count if at < 2.4 else count - min(10_000_000, int((at - 2.4) * 1e8))) for at, count in samples
    ]
    assert warm_gbps(dipped, 0.1, 1.0) == pytest.approx(0.8)


def test_warm_rate_of_bursts_is_taken_over_whole_round_trips() -> None:
    """A stream that sends one window per round trip is measured right, wherever the measurement begins."""
    rtt, window = 0.3, 3_000_000
    samples = [(i / 100, window * int(i / 100 / rtt + 1e-9)) for i in range(600)]
    for seconds in (1.4, 1.5, 1.6):
        assert warm_gbps(samples, rtt, seconds) == pytest.approx(window * 8e-9 / rtt, rel=0.02)


def test_cold_rate_and_time_count_from_the_first_byte() -> None:
    """New streams are timed from the arrival of their first byte, not from when they were opened."""
    samples = ramp(1e8, 1.0, 3.0)
    assert cold_gbps(samples, 0.05) == pytest.approx(0.8, rel=0.03)
    assert seconds_for(samples, 50_000_000) == pytest.approx(0.5, abs=0.02)
    assert seconds_for(samples, 10**12) is None
    assert seconds_for([(0.0, 0), (1.0, 0)], 1) is None
    assert cold_gbps([(0.0, 0), (1.0, 0)], 0.05) == 0.0


def test_late_samples_show_a_lack_of_cpu() -> None:
    """Samples on time waited for nothing; one that came half the time late says so."""
    assert waited_share(ramp(1e8, 0.0, 1.0), 0.01) == 0.0
    assert waited_share([(0.0, 0), (0.01, 1), (1.01, 2), (2.0, 3)], 0.5) == 0.0
    assert waited_share([(0.0, 0), (0.02, 1), (0.04, 2), (0.16, 3)], 0.02) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("gbps", "text"),
    [(9.4, "9.4 Gb/s"), (0.9651, "965 Mb/s"), (0.0201, "20.1 Mb/s"), (2.5e-6, "2.5 kb/s"), (0, "0 kb/s")],
)
def test_rates_are_readable(gbps: float, text: str) -> None:
    """Three digits and the unit that fits."""
    assert rate_text(gbps) == text


@pytest.mark.parametrize(
    ("count", "text"), [(3.675e6, "3.7 MB"), (42e3, "42 kB"), (1.25e9, "1.2 GB"), (900, "900 B")]
)
def test_sizes_are_readable(count: float, text: str) -> None:
    """Two or three digits and the unit that fits."""
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("points", "here", "said"),
    [
        ({1: 33.4, 2: 33.0, 4: 34.1}, True, "Both sides are on this machine"),
        ({1: 0.09, 2: 0.18, 4: 0.36, 8: 0.7, 16: 0.96}, False, None),
        ({1: 0.94, 2: 0.94, 4: 0.7}, False, None),
        ({1: 33.4, 16: 32.8, 32: 4.88, 64: 65.7}, False, "What limits the streams cannot be judged: "),
        ({1: 0.5, 2: 0.0, 4: 0.5}, False, None),  # nothing was sent any more: a budget ended
    ],
)
def test_measurements_that_contradict_each_other_are_not_explained(
    points: dict[int, float], here: bool, said: str | None
) -> None:
    """Where the law is far from what was measured, or there is no link, the words claim nothing."""
    told = doubt(points, fit(points, 0.001), here=here)
    assert (told is None) if said is None else (told is not None and said in told)
