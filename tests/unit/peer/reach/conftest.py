"""Peers in one process that meet: nobody is late."""

from __future__ import annotations

import pytest

from p2pavg.peer.reach import common, errands, gaps, meetings, relaying
from p2pavg.transport.ways import punching


@pytest.fixture(autouse=True)
def _nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stand for seconds, after which peers take another way, by a relay in the end. Which
    way they take when somebody is late is told by tests that say so.
    """
    waits = (
        *((common, "ANSWER_S"), (gaps, "ANSWER_S"), (relaying, "ANSWER_S"), (errands, "PASS_S")),
        *((meetings, "OBSERVED_S"), (meetings, "GREETING_S"), (meetings, "PASS_S")),
    )
    for module, name in waits:
        monkeypatch.setattr(module, name, 60.0)
    monkeypatch.setattr(punching, "relay_after_s", lambda rtt_s: 60.0)
