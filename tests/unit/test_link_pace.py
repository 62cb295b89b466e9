"""The streams of a link are held to what the path carries, once it has shown that it is full."""

from __future__ import annotations

import pytest

from p2pavg.rounds.link_pace import ROUNDS_KEPT, LinkPace
from p2pavg.transport.engine import StreamStats

RTT = 0.1


def rows(
    streams: int = 4, *, rate_bps: float = 8e6, again: int = 0, rtt_s: float = RTT, first: int = 0
) -> list[StreamStats]:
    """Each stream's statistics."""
    return [
        StreamStats(first + number, 0, 0, rtt_s, 0, rate_bps, 0, 0.0, retransmits=again)
        for number in range(streams)
    ]


def test_path_that_is_not_full_is_left_alone() -> None:
    """No loss, no queue: streams send as fast as they can."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows()) is None
    assert pace.observe(10_000_000, RTT, rows(again=2)) is None  # eight segments may be chance
    assert pace.observe(100_000_000, RTT, rows(again=80)) is None  # 0.46% of the bytes


@pytest.mark.parametrize("full", [rows(again=10), rows(rtt_s=0.171 + 0.001)])
def test_full_path_holds_streams_back(full: list[StreamStats]) -> None:
    """After losses or a long queue every stream gets its share of half as much again as all delivered."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(rate_bps=8e6)) is None
    assert pace.observe(1_000_000, RTT, full) == pytest.approx(1.5e6)
    assert pace.observe(1_000_000, RTT, full) is None
    assert pace.observe(1_000_000, RTT, rows(rate_bps=9.9e6)) is None
    assert pace.observe(1_000_000, RTT, rows(rate_bps=10.1e6)) == pytest.approx(1.5 * 10.1e6 / 8)


def test_new_streams_are_told() -> None:
    """A stream that was opened again, or more of them: all are held back anew."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(rtt_s=1.0)) == pytest.approx(1.5e6)
    assert pace.observe(0, RTT, rows(rtt_s=1.0, first=1)) == pytest.approx(1.5e6)
    assert pace.observe(0, RTT, rows(8, rate_bps=4e6)) == pytest.approx(0.75e6)
    assert pace.observe(0, RTT, []) is None


def test_losses_of_earlier_rounds_do_not_count() -> None:
    """What a stream sent again before this round began says nothing about it."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(again=1000)) is None
    pace.round_over()
    assert pace.observe(1_000_000, RTT, rows(again=3000)) is None


def test_best_rate_is_forgotten() -> None:
    """The path is taken to be as fast as in the best of the last rounds."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(rate_bps=16e6, rtt_s=1.0)) == pytest.approx(3e6)
    pace.round_over()
    for _ in range(ROUNDS_KEPT):
        assert pace.observe(0, RTT, rows()) is None
        pace.round_over()
    assert pace.observe(0, RTT, rows()) == pytest.approx(1.5e6)
