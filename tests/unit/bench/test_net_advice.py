"""bench net: what holds one stream back, and which setting would gain what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.bench.net.advice import Burst, SenderView, advise, reason_text, why_one_stream_stops
from p2pavg.bench.net.fit import Fit

LONG = Fit(rtt_s=0.3, window_bytes=3.5e6, rate_gbps=0.965, best_streams=11, filled=True, window_limited=True)
FREE = SenderView(sndbuf_limited=0.0, rwnd_limited=0.0, retransmit_share=0.0, rtt_growth=1.0)
KERNEL = {
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.ipv4.tcp_rmem": "4096 131072 33554432",
    "net.ipv4.tcp_slow_start_after_idle": "1",
    "net.ipv4.tcp_congestion_control": "cubic",
}
SETTLED = {"cubic": 0.09}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sndbuf_limited": 0.9}, "send buffer"),
        ({"rwnd_limited": 0.9}, "receive buffer"),
        ({"rwnd_limited": 0.9, "sndbuf_limited": 0.1}, "receive buffer"),
        ({}, "path"),
        ({"sndbuf_limited": 0.9, "rtt_growth": 1.3}, "path"),
    ],
)
def test_the_reason_follows_what_the_kernel_saw(changes: dict[str, float], reason: str) -> None:
    """An empty or a full buffer is to blame, unless the stream's own queue shows that the path is."""
    assert why_one_stream_stops(LONG, replace(FREE, **changes)) == reason
    assert reason_text(reason)


def test_nothing_holds_a_stream_back_that_fills_the_link() -> None:
    """Where one stream fills the link, the link is the reason, and no sentence is needed."""
    short = replace(LONG, best_streams=1, window_limited=False)
    assert why_one_stream_stops(short, replace(FREE, sndbuf_limited=1.0)) == "link"
    assert reason_text("link") == ""


def test_buffers_are_sized_for_what_would_be_in_flight() -> None:
    """A stream that fills 965 Mb/s over 300 ms has 36 MB in flight: both ends need larger buffers."""
    wmem, rmem = advise(LONG, "send buffer", KERNEL, KERNEL, None, SETTLED)
    assert (wmem.sysctl, wmem.where) == ("net.ipv4.tcp_wmem", "sender")
    assert (rmem.sysctl, rmem.where) == ("net.ipv4.tcp_rmem", "receiver")
    for one, share in ((wmem, 0.75), (rmem, 0.5)):
        assert int(one.suggested.split()[-1]) * share >= 0.965e9 / 8 * 0.3
        assert one.suggested.split()[:2] == KERNEL[one.sysctl].split()[:2]
    assert "965 Mb/s, not 93.3 Mb/s" in wmem.gain
    assert "sysctl -w net.ipv4.tcp_wmem=" in wmem.line()


def test_a_buffer_that_is_large_enough_is_left_alone() -> None:
    """Only the end that is too small is named."""
    large = {**KERNEL, "net.ipv4.tcp_rmem": "4096 131072 268435456"}
    assert [one.sysctl for one in advise(LONG, "send buffer", KERNEL, large, None, SETTLED)] == [
        "net.ipv4.tcp_wmem"
    ]


@pytest.mark.parametrize("reason", ["path", "link"])
def test_no_buffer_is_named_when_no_buffer_is_the_reason(reason: str) -> None:
    """Where the path holds a stream back, larger buffers gain nothing and are not suggested."""
    assert advise(LONG, reason, KERNEL, KERNEL, None, SETTLED) == []


@pytest.mark.parametrize(
    ("idle_s", "setting", "named"), [(1.9, "1", True), (1.05, "1", False), (1.9, "0", False)]
)
def test_the_idle_reset_is_named_when_a_pause_costs_time(idle_s: float, setting: str, named: bool) -> None:
    """It is named when a burst after a pause was slower than at full speed, and the setting is on."""
    burst = Burst(bytes=120_000_000, streams=16, pause_s=1.2, cold_s=3.0, warm_s=1.0, idle_s=idle_s)
    kernel = {**KERNEL, "net.ipv4.tcp_slow_start_after_idle": setting}
    advice = advise(LONG, "path", kernel, kernel, burst, SETTLED)
    assert [one.sysctl for one in advice] == (["net.ipv4.tcp_slow_start_after_idle"] if named else [])
    assert all("1 s instead of 1.9 s" in one.gain for one in advice)


@pytest.mark.parametrize(("other", "named"), [(0.2, True), (0.1, False)])
def test_another_congestion_control_must_be_clearly_faster(other: float, named: bool) -> None:
    """One measurement each is noisy: only a gain of 30 % and more is named."""
    advice = advise(LONG, "path", KERNEL, KERNEL, None, {"cubic": 0.09, "bbr": other})
    assert [(one.sysctl, one.suggested) for one in advice] == (
        [("net.ipv4.tcp_congestion_control", "bbr")] if named else []
    )
