"""Whether another peer's event loop turns: its heartbeats say so, and so does every control message."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.rounds.machine.events import LinksMeasured
from p2pavg.rounds.machine.rules.deadlines import LOOP_LIMIT
from p2pavg.rounds.measure import gauges
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.rounds.protocol.roles import LinkFacts
from p2pavg.transport.engine import SELF, LinkHealth, StreamStats

NOW = 100.0


def loop_age(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float, control_s: float) -> float:
    """What the rounds are told. heartbeat_s: the age that the last heartbeat told; control_s: since the last
    control message, or, if none came, since the link was made.
    """
    engine: Any = SimpleNamespace(
        traffic=lambda link: (0, 0),
        stats=lambda link: [],
        health=lambda link: LinkHealth(NOW, 0.1, heartbeat_s, 0.0),
    )
    links: Any = {b"p": SimpleNamespace(id=1, last_heard=NOW - control_s, rtt=0.1, stuck_s=0.0)}
    monkeypatch.setattr(gauges.time, "monotonic", lambda: NOW)
    (health,) = Gauges(engine, links, SimpleNamespace(running=list)).health().peers  # type: ignore[arg-type]
    return health.loop_s


@pytest.mark.parametrize("heartbeat_s", [math.inf, 8.0])
def test_a_loop_turns_though_its_heartbeats_wait(monkeypatch: pytest.MonkeyPatch, heartbeat_s: float) -> None:
    """The first heartbeat waits behind chunks, or was sent before its rounds began: control messages came
    since.
    """
    assert loop_age(monkeypatch, heartbeat_s, control_s=0.4) == pytest.approx(0.4)


def test_a_loop_that_stands_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on from native threads, and tell how long it has stood. It says nothing itself."""
    assert loop_age(monkeypatch, LOOP_LIMIT + 1.0, control_s=LOOP_LIMIT + 1.5) == LOOP_LIMIT + 1.0


def test_a_loop_turns_between_control_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come once a second; heartbeats know better."""
    assert loop_age(monkeypatch, 0.1, control_s=0.9) == 0.1


def test_bytes_that_wait_to_be_read_have_come() -> None:
    """The engine reads a chunk of a short path when it is whole, and late on a busy machine: the peer's data
    moves all the same.
    """
    streams = [StreamStats(number, 0, 0, 0.1, 0, 0.0, 0, 0.0, unread_bytes=70) for number in (0, 1)]
    engine: Any = SimpleNamespace(traffic=lambda link: (0, 1000), stats=lambda link: streams)
    job: Any = SimpleNamespace(links=(SELF, 1), rank=0, expected=lambda rank: (4, 0))
    progress: Any = SimpleNamespace(contributions_received=[0, 2], results_received=[0, 0])
    read = Gauges(engine, {}, SimpleNamespace())  # type: ignore[arg-type]
    assert [rank.bytes_received for rank in read.ranks(job, progress)] == [0, 1140]


def test_links_are_told_when_their_figures_change() -> None:
    """What was told already is not told again, though another round has passed."""
    link = SimpleNamespace(id=1, prior=None, brings_bps=0.0, rtt_min=0.1)
    read = Gauges(SimpleNamespace(), {b"p": link}, SimpleNamespace())  # type: ignore[arg-type,dict-item]
    assert read.fresh_links() == LinksMeasured({b"p": LinkFacts(0.0, 0.1)})
    assert read.fresh_links() is None
    link.brings_bps = 1e6
    assert read.fresh_links() == LinksMeasured({b"p": LinkFacts(1e6, 0.1)})
