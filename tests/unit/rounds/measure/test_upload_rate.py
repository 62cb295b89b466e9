"""What a peer and its links can move is known only from moments in which more waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.rounds.measure import gauges
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.transport.engine import StreamStats
from p2pavg.transport.paths import PathFacts

UP = {1: 1.5e6 / 8, 2: 28.5e6 / 8}  # bytes/s
DOWN = {1: 4e6 / 8, 2: 9e6 / 8}


def measured(
    monkeypatch: pytest.MonkeyPatch,
    *,
    unsent: tuple[int, int] = (0, 0),
    sent: tuple[int, int] = (9, 9),
    arrived: tuple[int, int] = (9, 9),
) -> Gauges:
    """One second over links 1 and 2, each with nine chunks of contributions in either direction."""
    now = 0.0
    engine: Any = SimpleNamespace(
        traffic=lambda link: (int(UP[link] * now), int(DOWN[link] * max(0.0, now - 0.3))),
        stats=lambda link: [StreamStats(0, 0, 0, 0.0, 0, 0.0, 0, 0.0, unsent_bytes=unsent[link - 1])],
    )
    links: Any = {
        bytes([link]): SimpleNamespace(id=link, rtt_min=0.01, prior=None, brings_bps=0.0) for link in UP
    }
    job = SimpleNamespace(
        links=(-1, 1, 2),
        expected=lambda rank: (9, 9) if rank else (0, 0),
        owed=lambda rank: 9 if rank else 0,
    )
    progress = SimpleNamespace(contributions_sent=(0, *sent), contributions_received=(0, *arrived))
    jobs: Any = SimpleNamespace(
        running=lambda: [7], get=lambda transfer: job, progress=lambda transfer: progress
    )
    monkeypatch.setattr(gauges.time, "monotonic", lambda: now)
    meters = Gauges(engine, links, jobs)
    for tick in range(11):
        now = tick / 10
        meters.measure_rates()
    return meters


@pytest.mark.parametrize(
    ("unsent", "sent", "known"),
    [((5000, 5000), (9, 9), 3e7), ((5000, 0), (9, 9), 0.0), ((5000, 0), (9, 3), 3e7), ((0, 0), (3, 3), 3e7)],
)
def test_upload_counts_while_all_links_are_full(
    monkeypatch: pytest.MonkeyPatch, unsent: tuple[int, int], sent: tuple[int, int], known: float
) -> None:
    """Links of 1.5 and 28.5 Mb/s: together the upload, unless one of them had nothing left to send, in the
    kernel or before it.
    """
    meters = measured(monkeypatch, unsent=unsent, sent=sent)
    assert meters.upload_bps == pytest.approx(known, rel=0.01)


def test_a_link_counts_while_contributions_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first bytes on, as long as not all contributions of the other side are in."""
    meters = measured(monkeypatch, arrived=(3, 9))
    assert meters.links[bytes([1])].bps == pytest.approx(4e6, rel=0.01)


def test_a_download_tells_what_a_link_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a state comes a newcomer measures its links; a link of which an earlier run knew counts from its
    first moment.
    """
    now = 0.0
    engine: Any = SimpleNamespace(traffic=lambda link: (0, int(DOWN[link] * now)), stats=lambda link: [])
    prior = PathFacts(0.1, 7e6, 16, 0.0)
    links: Any = {
        bytes([1]): SimpleNamespace(id=1, rtt_min=0.01, prior=None, brings_bps=0.0),
        bytes([2]): SimpleNamespace(id=2, rtt_min=0.1, prior=prior, brings_bps=0.0),
    }
    jobs: Any = SimpleNamespace(running=list)
    monkeypatch.setattr(gauges.time, "monotonic", lambda: now)
    meters = Gauges(engine, links, jobs)
    assert [link.bps for link in meters.links.values()] == [0.0, 7e6]
    for tick in range(11):
        now = tick / 10
        meters.measure_rates(downloading=tick > 0)
    assert [link.bps for link in meters.links.values()] == [
        pytest.approx(4e6, rel=0.01),
        pytest.approx(9e6, rel=0.01),
    ]
