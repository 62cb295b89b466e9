"""A report as one flat dict of numbers, for loggers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pavg.report import RoundReport

PHASES = ("calculation", "waiting", "matchmaking", "transfer", "commit", "update", "overlapped", "total")


def flat(report: RoundReport) -> dict[str, float]:
    """The numbers of a report; see `RoundReport.flat`."""
    found: dict[str, float] = {
        "epoch": report.epoch,
        "peers": len(report.members),
        "samples": report.samples,
        "local_samples": report.local_samples,
        "samples_discarded": report.samples_discarded,
        "samples_per_second": report.samples_per_second,
        "local_samples_per_second": report.local_samples_per_second,
        "attempts": report.attempts,
        "failed_members": len(report.failed_members),
        "links": len(report.links),
    }
    found |= {f"seconds_{phase}": getattr(report, f"seconds_{phase}") for phase in PHASES}
    found |= {
        "seconds_communication": report.seconds_communication,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "wire_bytes_sent": report.wire_bytes_sent,
        "wire_bytes_received": report.wire_bytes_received,
        "spared_bytes": report.spared_bytes,
        "bytes_between_regions": report.bytes_between_regions,
        "seconds_stretched": report.seconds_stretched,
        "egress_dollars": report.egress_dollars,
        "egress_bytes_per_hour": report.egress_bytes_per_hour,
    }
    told = {
        name: float(value)
        for name, value in report.extra.items()
        if value is not None and math.isfinite(value)
    }
    return found | {f"extra_{name}": value for name, value in told.items()}
