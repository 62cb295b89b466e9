"""A link on which nothing that we send is acknowledged does not carry our words, though others' come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.rounds.measure import gauges
from p2pavg.rounds.measure.acknowledged import Acknowledged
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.transport.engine import LinkHealth, StreamStats


class Clock:
    """One link of two streams over ten seconds, looked at ten times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sent = self.under_way = self.unsent = 0
        self.stream = 1
        engine: Any = SimpleNamespace(
            stats=lambda link: [
                self._stats(0, 0, 0, 0),
                self._stats(self.stream, self.sent, self.under_way, self.unsent),
            ],
            health=lambda link: LinkHealth(self.now, 4.0, 0.0, 0.0),
        )
        links: Any = {b"p": SimpleNamespace(id=1, last_heard=self.now, rtt=4.0, rtt_min=0.1, stuck_s=0.0)}
        self.link = links[b"p"]
        monkeypatch.setattr(gauges.time, "monotonic", lambda: self.now)
        self._gauges = Gauges(engine, links, SimpleNamespace(running=list))  # type: ignore[arg-type]

    def _stats(self, stream: int, sent: int, under_way: int, unsent: int) -> StreamStats:
        return StreamStats(stream, sent, 0, 0.1, 0, 0.0, under_way, 0.0, unsent_bytes=unsent)

    def beats(self, seconds: float, acknowledged: int) -> list[float]:
        """Heartbeats of 50 bytes go out; of what is under way so much is acknowledged each time."""
        ages = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.sent += 50
            self.under_way = max(0, self.under_way + 50 - acknowledged)
            (health,) = self._gauges.health().peers
            assert health.rtt_s == 0.1  # of the kernel: the heartbeats' own holds how long a cut lasted
            ages.append(health.heard_s)
        return ages


def test_what_is_never_acknowledged_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heard all the time, but nothing of ours arrives: the link counts as unheard since the last that did."""
    link = Clock(monkeypatch)
    assert max(link.beats(2.0, acknowledged=50)) == 0.0
    cut = link.beats(3.0, acknowledged=0)
    assert cut == sorted(cut)
    assert cut[-1] == pytest.approx(3.0, abs=0.11)
    assert max(link.beats(1.0, acknowledged=100)) == 0.0


def test_a_slow_link_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a long queue heartbeats arrive seconds late; as long as something is acknowledged, it moves."""
    link = Clock(monkeypatch)
    link.beats(0.1, acknowledged=50)
    link.sent += 1_000_000
    link.under_way, link.unsent = 500_000, 500_000
    assert max(link.beats(5.0, acknowledged=100)) == 0.0


def test_a_full_receiver_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits here because the other side does not read is not under way."""
    link = Clock(monkeypatch)
    link.unsent = 1_000_000
    link.sent = 1_000_000
    assert max(link.beats(2.0, acknowledged=50)) == 0.0


def test_what_warmed_a_stream_up_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream comes with bytes under way that it does not count as sent; as these arrive, it moves."""
    link = Clock(monkeypatch)
    link.beats(1.0, acknowledged=50)
    link.stream, link.sent, link.under_way = 2, 0, 500_000
    assert max(link.beats(0.1, acknowledged=1000)) <= 0.11
    assert max(link.beats(5.0, acknowledged=1000)) == 0.0


def test_a_stream_in_the_place_of_another_is_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a stream is replaced in the midst of a cut, the cut goes on."""
    link = Clock(monkeypatch)
    link.beats(1.0, acknowledged=50)
    link.beats(1.0, acknowledged=0)
    link.stream, link.sent, link.under_way = 2, 0, 0
    assert link.beats(1.0, acknowledged=0)[-1] == pytest.approx(2.0, abs=0.11)


def test_words_that_do_not_arrive_make_a_link_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats pass on data streams, and the control connection has acknowledged nothing for long: no word
    of a round arrives.
    """
    link = Clock(monkeypatch)
    link.beats(1.0, acknowledged=50)
    link.link.stuck_s = 0.9
    assert max(link.beats(0.1, acknowledged=50)) == 0.0
    link.link.stuck_s = 4.0
    assert max(link.beats(0.1, acknowledged=50)) == pytest.approx(4.0 - gauges.STUCK_S)


def test_a_link_without_data_streams_carries_no_round() -> None:
    """A control connection alone does not do: the peer counts as silent until a stream is open again."""
    acknowledged, stream = Acknowledged(100.0), StreamStats(0, 0, 0, 0.1, 0, 0.0, 0, 0.0)
    assert acknowledged.age(100.5, []) == 0.5
    assert acknowledged.age(101.0, [stream]) == 0.0
    assert acknowledged.age(104.0, []) == 3.0
