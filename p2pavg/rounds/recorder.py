"""Recorder: the clock readings of an epoch, and the RoundReport made of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.identity import short_id
from p2pavg.report import LinkReport, MemberReport, RoundReport
from p2pavg.rounds import events as ev
from p2pavg.transport.engine import Engine, JobProgress
from p2pavg.transport.link import Link

logger = logging.getLogger("p2pavg.rounds")
RATE_MEMORY = 0.7  # weight of the past in the moving averages of step time and rate


class Recorder:
    """Measures one peer's epochs. Runs on the loop thread."""

    def __init__(
        self, run_id: str, me: bytes, codec: str, engine: Engine, publish: Callable[[RoundReport], None]
    ) -> None:
        self._run_id = run_id
        self._me = me
        self._codec = codec
        self._engine = engine
        self._publish = publish
        self._epoch_start = time.monotonic()
        self._arrived_at: float | None = None
        self._causes: list[str] = []
        self._bytes: dict[int, tuple[int, int]] = {}
        self._seen = (time.monotonic(), 0, 0)
        self._moved = (0.0, 0.0)
        self._rate = 0.0
        self.step_seconds = 0.0

    def rate(self, samples: int, steps: int) -> float:
        """Samples per second of the training thread, from what was counted since it was last asked."""
        now = time.monotonic()
        at, before, steps_before = self._seen
        if steps < steps_before + 1 or now - at < 0.01:
            return self._rate
        if samples > before:
            fresh, step = (samples - before) / (now - at), (now - at) / (steps - steps_before)
            self._rate = fresh if self._rate == 0.0 else RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * fresh
            self.step_seconds = (
                step
                if self.step_seconds == 0.0
                else RATE_MEMORY * self.step_seconds + (1 - RATE_MEMORY) * step
            )
        self._seen = (now, samples, steps)
        return self._rate

    def arrived(self, now: float) -> None:
        """The training thread stopped at a boundary."""
        self._arrived_at = now

    def begun(self, now: float, links: Mapping[bytes, Link]) -> None:
        """An attempt's transfer starts: note the byte counters."""
        self._bytes = {link.id: self._counted(link.id) for link in links.values()}

    def moved(self, progress: JobProgress) -> None:
        """All bytes of an attempt are through."""
        self._moved = (progress.first_byte_at, progress.last_byte_at)

    def attempt_failed(self, why: str) -> None:
        """An attempt was given up."""
        self._causes.append(why)

    def blamed(self, peer: bytes, why: str) -> None:
        """A member failed an attempt."""
        self._causes.append(f"{short_id(peer)}: {why}")

    def round_failed(self, why: str, blamed: tuple[bytes, ...]) -> None:
        """The epoch has no average."""
        self._causes.append(why)

    def trace(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Detail for debugging."""
        logger.debug("%s %s", kind, fields)

    def healed(self, now: float) -> None:
        """A downloaded state was loaded: the epoch's clock starts anew."""
        self._epoch_start = now
        self._seen = (now, 0, self._seen[2])
        self._causes.clear()

    def finished(
        self,
        commit: ev.Commit,
        seconds_update: float,
        extra: Mapping[str, float],
        steps: int,
        discarded: tuple[tuple[int, str], ...],
        links: Mapping[bytes, Link],
    ) -> RoundReport:
        """The epoch was applied: its report, also handed to `publish`."""
        now = time.monotonic()
        total = now - self._epoch_start
        phases = {name: commit.seconds.get(name, 0.0) for name in ("matchmaking", "transfer", "commit")}
        if commit.late or self._arrived_at is None:  # it computed all the time: nothing was waited for
            phases = dict.fromkeys(phases, 0.0)
            calculation = max(0.0, total - seconds_update)
        else:
            calculation = min(max(0.0, self._arrived_at - self._epoch_start), total)
        waiting = max(0.0, total - calculation - seconds_update - sum(phases.values()))
        link_reports = self._links(links)
        mine = next((i for i, seat in enumerate(commit.members) if seat.peer == self._me), None)
        report = RoundReport(
            run_id=self._run_id,
            peer=self._me.hex(),
            epoch=commit.ballot.epoch,
            attempts=commit.attempts,
            leader=commit.ballot.leader.hex(),
            lineage=commit.lineage.hex(),
            members=tuple(
                MemberReport(seat.peer.hex(), weight, samples, seat.voter)
                for seat, weight, samples in zip(commit.members, commit.weights, commit.samples, strict=True)
            ),
            samples=sum(commit.samples),
            local_samples=commit.samples[mine] if mine is not None else 0,
            samples_discarded=sum(samples for samples, _ in discarded),
            discarded_why=tuple(why for _, why in discarded),
            failed_members=tuple(peer.hex() for peer, _ in commit.failed),
            causes=tuple(self._causes),
            seconds_calculation=calculation,
            seconds_waiting=waiting,
            seconds_matchmaking=phases["matchmaking"],
            seconds_transfer=phases["transfer"],
            seconds_commit=phases["commit"],
            seconds_update=seconds_update,
            seconds_total=total,
            bytes_sent=sum(link.bytes_sent for link in link_reports),
            bytes_received=sum(link.bytes_received for link in link_reports),
            codec=self._codec,
            first_byte_at=self._moved[0],
            last_byte_at=self._moved[1],
            links=link_reports,
            finished_at=time.time(),
            extra=dict(extra),
        )
        self._epoch_start = now
        self._arrived_at = None
        self._causes.clear()
        self._seen = (now, 0, steps)
        self._publish(report)
        return report

    def _counted(self, link: int) -> tuple[int, int]:
        stats = self._engine.stats(link)
        return sum(s.bytes_sent for s in stats), sum(s.bytes_received for s in stats)

    def _links(self, links: Mapping[bytes, Link]) -> tuple[LinkReport, ...]:
        reports = []
        for peer, link in links.items():
            stats = self._engine.stats(link.id)
            sent, received = self._counted(link.id)
            sent_before, received_before = self._bytes.get(link.id, (0, 0))
            reports.append(
                LinkReport(
                    peer=peer.hex(),
                    bytes_sent=max(0, sent - sent_before),
                    bytes_received=max(0, received - received_before),
                    streams=len(stats),
                    rtt_s=link.rtt,
                    window_bytes=max((s.window_bytes for s in stats), default=0),
                    rate_bps=sum(s.delivery_rate_bps for s in stats),
                )
            )
        return tuple(reports)
