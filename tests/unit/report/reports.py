"""Reports for tests."""

from __future__ import annotations

from typing import Any

from p2pavg.report import LinkReport, MemberReport, RoundReport
from p2pavg.report.distance import Distance


def link(sent: int, where: Distance, peer: str = "bb" * 20) -> LinkReport:
    """A link that moved so many bytes each way, of frames and on the wire."""
    return LinkReport(
        peer, sent, sent, 4, 0.05, 2_500_000, 1e8, where, wire_bytes_sent=sent, wire_bytes_received=sent
    )


def report(**changes: Any) -> RoundReport:
    """A report of one epoch, with these fields."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "peer": "aa" * 20,
        "epoch": 3,
        "attempts": 1,
        "leader": "aa" * 20,
        "lineage": "cc" * 32,
        "members": (MemberReport("aa" * 20, 400.0, 400, True), MemberReport("bb" * 20, 600.0, 600, True)),
        "samples": 1000,
        "local_samples": 400,
        "samples_discarded": 0,
        "discarded_why": (),
        "failed_members": (),
        "causes": (),
        "seconds_calculation": 8.0,
        "seconds_waiting": 0.0,
        "seconds_matchmaking": 0.0,
        "seconds_transfer": 1.5,
        "seconds_commit": 0.1,
        "seconds_update": 0.4,
        "seconds_total": 10.0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "codec": "fp16",
        "finished_at": 1000.0,
    }
    return RoundReport(**{**fields, **changes})
