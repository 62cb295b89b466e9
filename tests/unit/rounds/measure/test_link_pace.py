"""The streams of a link are held to what the path carries, once it has shown that it is full."""

from __future__ import annotations

import math

import pytest

from p2pavg.rounds.measure.link_pace import ROUNDS_KEPT, LinkPace
from p2pavg.transport.engine import StreamStats

RTT = 0.1


def rows(
    streams: int = 4,
    *,
    rate_bps: float = 8e6,
    again: int = 0,
    rtt_s: float = RTT,
    first: int = 0,
    unacked: int = 9000,
) -> list[StreamStats]:
    """Each stream's statistics."""
    return [
        StreamStats(first + number, 0, 0, rtt_s, 0, rate_bps, unacked, 0.0, retransmits=again)
        for number in range(streams)
    ]


def full(pace: LinkPace, **facts: float) -> float | None:
    """What it says once a round has found a long queue."""
    pace.observe(0, RTT, rows(**facts))  # type: ignore[arg-type]
    return pace.observe(1_000_000, RTT, rows(rtt_s=1.0, **facts))  # type: ignore[arg-type]


def test_path_that_is_not_full_is_left_alone() -> None:
    """No loss, no queue: streams send as fast as they can."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows()) is None
    assert pace.observe(10_000_000, RTT, rows(again=2)) is None  # eight segments may be chance
    assert pace.observe(100_000_000, RTT, rows(again=80)) is None  # 0.46% of the bytes
    assert pace.observe(100_000_000, RTT, rows(rtt_s=9.0, unacked=0)) is None  # a round trip of earlier
    assert pace.round_over() is None


@pytest.mark.parametrize("facts", [{"again": 10}, {"rtt_s": 0.171}])
def test_full_path_holds_streams_back(facts: dict[str, float]) -> None:
    """After losses or a long queue every stream gets its share of twice what all delivered."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(rate_bps=8e6)) is None
    if "rtt_s" in facts:
        assert pace.observe(200_000, RTT, rows(rtt_s=9.0)) is None  # so little tells nothing
    assert pace.observe(1_000_000, RTT, rows(**facts)) == pytest.approx(2e6)  # type: ignore[arg-type]
    assert pace.observe(1_000_000, RTT, rows()) is None
    assert pace.observe(1_000_000, RTT, rows(rate_bps=9.9e6)) is None
    assert pace.observe(1_000_000, RTT, rows(rate_bps=10.1e6)) == pytest.approx(2 * 10.1e6 / 8)


def test_new_streams_are_told() -> None:
    """A stream that was opened again, or more of them: all are held back anew."""
    pace = LinkPace()
    assert full(pace) == pytest.approx(2e6)
    assert pace.observe(0, RTT, rows(first=1)) == pytest.approx(2e6)
    assert pace.observe(0, RTT, rows(8, rate_bps=4e6)) == pytest.approx(1e6)
    assert pace.observe(0, RTT, []) is None


def test_only_gradients_are_held_back() -> None:
    """When a round is over nothing is held back; when the next one begins, everything is at once."""
    pace = LinkPace()
    assert full(pace) == pytest.approx(2e6)
    assert pace.round_over() == math.inf
    assert pace.round_over() is None
    assert pace.observe(1_000_000, RTT, rows(unacked=0)) == pytest.approx(2e6)


def test_losses_of_earlier_rounds_do_not_count() -> None:
    """What a stream sent again before this round began says nothing about it."""
    pace = LinkPace()
    assert pace.observe(0, RTT, rows(again=1000)) is None
    pace.round_over()
    assert pace.observe(1_000_000, RTT, rows(again=3000)) is None


def test_best_rate_is_forgotten() -> None:
    """The path is taken to be as fast as in the best of the last rounds."""
    pace = LinkPace()
    assert full(pace, rate_bps=16e6) == pytest.approx(4e6)
    for _ in range(ROUNDS_KEPT):
        pace.round_over()
        assert pace.observe(0, RTT, rows()) == pytest.approx(4e6)
    pace.round_over()
    pace.round_over()
    assert pace.observe(0, RTT, rows()) == pytest.approx(2e6)
