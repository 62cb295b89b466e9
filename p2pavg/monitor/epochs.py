"""Epochs: the last rounds of a run, put together from the reports of its members. Pure."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from p2pavg.report import PHASES
from p2pavg.report.compact import CompactReport

KEPT = 24  # rounds
USUAL_OF = 16  # rounds, of which the median is the usual length
PARTS = (*PHASES, "overlapped")


@dataclass(slots=True)
class Round:
    """One epoch that ended with an average, as those members tell of it that are watched."""

    epoch: int
    at: float  # seconds, on the caller's clock: when the first member told of it
    reports: dict[bytes, CompactReport] = field(default_factory=dict)  # by peer

    @property
    def seconds(self) -> float:
        """Wall clock, the mean over its members."""
        return statistics.fmean(report.seconds_total for report in self.reports.values())

    @property
    def discarded(self) -> int:
        """Samples that its members name as discarded."""
        return sum(report.samples_discarded for report in self.reports.values())

    def to_dict(self, at: float) -> dict[str, Any]:
        """JSON data. at: when it ended, as time.time()."""
        told = list(self.reports.values())
        spent = [[getattr(report, f"seconds_{name}") for name in PARTS] for report in told]
        return {
            "epoch": self.epoch,
            "at": at,
            "attempts": max(report.attempts for report in told),
            "members": max(report.members for report in told),
            "samples": max(report.samples for report in told),
            "discarded": self.discarded,
            "seconds": self.seconds,
            "phases": [statistics.fmean(column) for column in zip(*spent, strict=True)],
            "peers": {
                peer.hex(): [report.local_samples, report.seconds_total, sum(report.sent.values()), *parts]
                for (peer, report), parts in zip(self.reports.items(), spent, strict=True)
            },
        }


class Epochs:
    """The last KEPT rounds, and what was counted over all of them."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, Round] = OrderedDict()
        self.ended = 0  # epochs that ended with an average
        self.samples = 0  # in these
        self.failed_attempts = 0
        self.discarded = 0  # samples
        self.ended_at: float | None = None  # when the last one did

    def add(self, peer: bytes, report: CompactReport, now: float) -> None:
        """Take a member's report of an epoch."""
        self.discarded += report.samples_discarded
        if not report.members:
            return  # the last report of a peer that leaves: no round ended with it
        found = self._rounds.get(report.epoch)
        if found is None:
            if self._rounds and report.epoch < next(iter(self._rounds)):
                return  # of a member that was stopped and catches up
            found = self._rounds[report.epoch] = Round(report.epoch, now)
            self.ended += 1
            self.samples += report.samples
            self.failed_attempts += max(0, report.attempts - 1)
            self.ended_at = now
            while len(self._rounds) > KEPT:
                self._rounds.popitem(last=False)
        found.reports[peer] = report

    def rounds(self) -> tuple[Round, ...]:
        """By epoch, oldest first."""
        return tuple(self._rounds[epoch] for epoch in sorted(self._rounds))

    def usual_seconds(self) -> float | None:
        """How long an epoch usually takes; None: none has ended."""
        last = self.rounds()[-USUAL_OF:]
        return statistics.median(one.seconds for one in last) if last else None
