"""Whom a peer tells of its epochs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from p2pavg.peer.peer import Peer
from p2pavg.report import RoundReport
from tests.unit.report.reports import report


def test_the_last_word_of_who_leaves_is_no_round(tmp_path: Path) -> None:
    """What a peer lost by leaving is written, but a function that is called for rounds is not called: it
    would tell of an epoch of no peers.
    """
    rounds: list[RoundReport] = []
    path = tmp_path / "reports.jsonl"
    options: dict[str, Any] = {"initial_peers": [], "listen": "127.0.0.1:0", "reports": path}
    peer = Peer("run", on_round=rounds.append, **options)
    told = [report(epoch=1), report(epoch=2, members=(), samples=0, samples_discarded=8)]
    for each in told:
        peer._publisher.publish(each)
    assert rounds == told[:1]
    assert len(path.read_text().splitlines()) == 2


def test_a_callback_that_raises_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """An epoch may take milliseconds: the traceback of on_round comes once, and every report is still
    given.
    """
    rounds: list[RoundReport] = []

    def callback(each: RoundReport) -> None:
        rounds.append(each)
        raise ValueError("a callback of the user's")

    peer = Peer("run", on_round=callback, initial_peers=[], listen="127.0.0.1:0")
    for epoch in range(3):
        peer._publisher.publish(report(epoch=epoch))
    assert len(rounds) == 3
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "the on_round callback raised"
    ]
