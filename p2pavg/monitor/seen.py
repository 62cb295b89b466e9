"""Seen: what a monitor knows of one peer. Pure: time is a parameter."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.report import PHASES
from p2pavg.report.compact import CompactReport
from p2pavg.report.distance import Distance
from p2pavg.report.status import Status

WINDOW_S = 30.0  # seconds of epochs over which rates are averaged
MOST_REPORTS = 2000


@dataclass(slots=True)
class Seen:
    """A peer's record, its last status, and its reports of the last WINDOW_S seconds."""

    info: PeerInfo | None = None
    status: Status | None = None
    heard_at: float = 0.0  # when the peer itself last sent anything
    status_at: float = float("-inf")
    linked: bool = False
    gone_at: float | None = None
    gone_why: str = ""
    silent: bool = False
    reports: deque[CompactReport] = field(default_factory=lambda: deque(maxlen=MOST_REPORTS))
    seconds: float = 0.0  # wall clock of the reports that are kept
    reported_at: float = float("-inf")
    # since the watch began
    sent: int = 0  # IP bytes
    received: int = 0
    discarded: int = 0  # samples
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds

    def add(self, report: CompactReport, now: float) -> bool:
        """Take a report. False: it was known."""
        if self.reports and self.reports[-1].epoch >= report.epoch:
            return False
        self.reports.append(report)
        self.seconds += report.seconds_total
        self.reported_at = now
        self.sent += sum(report.sent.values())
        self.received += report.wire_bytes_received
        self.discarded += report.samples_discarded
        for name in PHASES:
            self.phases[name] += getattr(report, f"seconds_{name}")
        while self.seconds - self.reports[0].seconds_total >= WINDOW_S:
            self.seconds -= self.reports.popleft().seconds_total
        return True

    def forget_reports(self) -> None:
        """Begin anew: over a link every epoch is reported, whereas records tell of some only."""
        self.reports.clear()
        self.seconds = 0.0

    @property
    def pace(self) -> float:
        """Samples per second over whole epochs, communication included."""
        return (
            sum(report.local_samples for report in self.reports) / self.seconds if self.seconds > 0 else 0.0
        )

    @property
    def rate(self) -> float:
        """Samples per second while it computes."""
        if self.status is not None:
            return self.status.rate
        return 0.0 if self.info is None else self.info.samples_per_second

    @property
    def region(self) -> str:
        """Where it says that it is."""
        if self.status is not None:
            return self.status.region
        return "" if self.info is None else self.info.region

    @property
    def epoch(self) -> int:
        """The newest epoch that it is known to have reached."""
        told = 0 if self.status is None else self.status.epoch
        reported = self.reports[-1].epoch + 1 if self.reports else 0
        return max(told, reported, 0 if self.info is None else self.info.epoch)

    @property
    def reach(self) -> str:
        """How others open connections to it."""
        if self.status is not None:
            words = self.status.reach
        else:
            words = "outgoing only" if self.info is not None and self.info.client_only else "direct"
        return words if self.info is None or self.info.udp else f"{words}, TCP"

    @property
    def sent_by_distance(self) -> dict[Distance, int]:
        """IP bytes by class of link, in the reports that are kept; empty where they tell of no time."""
        total = Counter[Distance]()
        for report in self.reports if self.seconds > 0 else ():
            total.update(report.sent)
        return total

    @property
    def sent_per_s(self) -> float:
        """IP bytes per second, over the reports that are kept."""
        return sum(self.sent_by_distance.values()) / self.seconds if self.seconds > 0 else 0.0
