"""What a peer can send is known only from moments in which more waits for every member."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.rounds import pulse
from p2pavg.rounds.pulse import Pulse
from p2pavg.transport.engine import StreamStats


@pytest.mark.parametrize(("unsent", "known"), [((5000, 5000), 3e7), ((5000, 0), 0.0)])
def test_upload_counts_while_all_links_are_full(
    monkeypatch: pytest.MonkeyPatch, unsent: tuple[int, int], known: float
) -> None:
    """Links of 1.5 and 28.5 Mb/s: together the upload, unless one of them had nothing left to send."""
    now = 0.0
    rates = {1: 1.5e6 / 8, 2: 28.5e6 / 8}
    engine: Any = SimpleNamespace(
        traffic=lambda link: (int(rates[link] * now), 0),
        stats=lambda link: [StreamStats(0, 0, 0, 0.0, 0, 0.0, 0, 0.0, unsent_bytes=unsent[link - 1])],
    )
    links: Any = {bytes([link]): SimpleNamespace(id=link, rtt_min=0.01) for link in rates}
    job = SimpleNamespace(links=(-1, 1, 2))
    jobs: Any = SimpleNamespace(running=lambda: [7], get=lambda transfer: job)
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now)
    meters = Pulse(engine, links, jobs)
    for tick in range(11):
        now = tick / 10
        meters.measure_rates()
    assert meters.upload_bps == pytest.approx(known, rel=0.01)
    assert dict(meters.link_bps)[bytes([1])] == pytest.approx(1.5e6, rel=0.01)
