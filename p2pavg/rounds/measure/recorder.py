"""Recorder: the clock readings of an epoch, and the RoundReport made of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.allreduce.choosing import RoundCost
from p2pavg.identity import short_id
from p2pavg.report import AttemptReport, LinkReport, MemberReport, RoundReport, phases
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.measure import memory
from p2pavg.rounds.measure.link_meter import LinkMeter, Moved
from p2pavg.rounds.training import Figures
from p2pavg.transport.engine import JobProgress
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")
RATE_MEMORY = 0.7  # weight of the past in the moving average of the rate
MOST_UNAPPLIED = 16  # averages whose stages are kept
MOST_ATTEMPTS = 64  # failed ones that one report names


class Recorder:
    """Measures one peer's epochs. Runs on the loop thread."""

    def __init__(
        self,
        run_id: str,
        me: bytes,
        codec: str,
        meter: LinkMeter,
        publish: Callable[[RoundReport], None],
        *,
        region: str = "",
        device: str = "",
    ) -> None:
        self._run_id = run_id
        self._me = me
        self._codec = codec
        self._meter = meter
        self._publish = publish
        self._region = region
        self._device = device
        self.on_trace: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: None
        self.cost: Callable[[], RoundCost | None] = lambda: None  # of the round that this peer planned last
        self.relayed: Callable[[], int] = lambda: 0  # bytes passed on for others so far
        self.spared: Callable[[], int] = lambda: 0  # bytes that packing kept off links and disks so far
        self.state_bytes: Callable[[], int] = lambda: 0  # of the state that newcomers download
        self._relayed = self._spared = 0  # of these, what was reported
        self._epoch_start = time.monotonic()
        self._is_first = True
        self._arrived_at: float | None = None
        self._waited = 0.0  # at boundaries of this epoch that led to no average
        self._idle = 0.0  # for other peers, before it computed
        self._attempt: tuple[act.OpenJob, float] | None = None
        self._failed: list[AttemptReport] = []
        self._causes: list[str] = []
        self._gone: dict[bytes, tuple[int, int]] = {}  # the epoch and the samples that each had told of
        self._seen = (time.monotonic(), 0, 0)
        self._moved = (0.0, 0.0)
        self._stretched = 0.0  # seconds of this epoch, for what rounds may cost
        # By stage, and what the round cost where this peer planned it. By transfer, until it is applied.
        self._sent: dict[int, tuple[Mapping[str, int], RoundCost | None]] = {}
        self._rate = 0.0

    def rate(self, samples: int, steps: int) -> float:
        """Samples per second of the training thread, from what was counted since it was last asked."""
        now = time.monotonic()
        at, before, steps_before = self._seen
        if steps < steps_before + 1 or now - at < 0.01:
            return self._rate
        if samples > before:
            fresh = (samples - before) / (now - at)
            self._rate = fresh if self._rate == 0.0 else RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * fresh
        self._seen = (now, samples, steps)
        return self._rate

    def arrived(self, now: float) -> None:
        """The training thread stopped at a boundary."""
        self._arrived_at = now

    def waited(self, seconds: float) -> None:
        """The training thread waited for other peers, and did not compute. The first epoch begins when those
        are there for which a script waits before it trains.
        """
        if self._is_first:
            self._epoch_start += seconds
        else:
            self._idle += seconds
        at, samples, steps = self._seen
        self._seen = (at + seconds, samples, steps)

    def resumed(self, now: float) -> None:
        """It computes on: the wait led to no average."""
        if self._arrived_at is not None:
            self._waited += now - self._arrived_at
            self._arrived_at = None

    def observe(self, links: Mapping[bytes, Link], *, moving: bool) -> None:
        """A beat. moving: gradients flow."""
        self._meter.observe(links, moving=moving)

    def links(self) -> tuple[LinkReport, ...]:
        """The links as last reported, for watchers."""
        return self._meter.current()

    def _freshly_relayed(self) -> int:
        before, self._relayed = self._relayed, self.relayed()
        return self._relayed - before

    def _freshly_spared(self) -> int:
        before, self._spared = self._spared, self.spared()
        return self._spared - before

    def opened(self, attempt: act.OpenJob, now: float) -> None:
        """An attempt's group is forming."""
        self._attempt = (attempt, now)

    def _plan_of(self, transfer: int) -> str:
        attempt = None if self._attempt is None else self._attempt[0]
        return attempt.plan.kind if attempt is not None and attempt.transfer == transfer else ""

    def committed(self, commit: act.Commit, stages: Mapping[str, int]) -> None:
        """A round is over. stages: bytes that this peer sent, by stage of the plan."""
        leads = commit.ballot.leader == self._me
        self._sent[commit.transfer] = stages, self.cost() if leads else None
        while len(self._sent) > MOST_UNAPPLIED:
            del self._sent[next(iter(self._sent))]

    def moved(self, progress: JobProgress) -> None:
        """All bytes of an attempt are through."""
        self._moved = (progress.first_byte_at, progress.last_byte_at)

    def attempt_failed(self, transfer: int, why: str, now: float) -> None:
        """An attempt was given up."""
        self._causes.append(why)
        if self._attempt is None or self._attempt[0].transfer != transfer:
            return
        (attempt, since), self._attempt = self._attempt, None
        self._failed.append(
            AttemptReport(
                attempt=attempt.ballot.attempt,
                leader=attempt.ballot.leader.hex(),
                members=tuple(seat.peer.hex() for seat in attempt.members),
                seconds=now - since,
                why=why,
            )
        )
        del self._failed[:-MOST_ATTEMPTS]

    def blamed(self, peer: bytes, why: str) -> None:
        """A member failed an attempt."""
        self._causes.append(f"{short_id(peer)}: {why}")

    def round_failed(self, why: str, blamed: tuple[bytes, ...]) -> None:
        """The epoch has no average."""
        self._causes.append(why)

    def trace(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Detail for debugging."""
        logger.debug("%s %s", kind, fields)
        if kind == act.TraceKind.STRETCHED:
            self._stretched = fields["seconds"]
        elif kind == act.TraceKind.DOWN:
            self._gone[fields["peer"]] = fields["epoch"], fields["samples"]
            if fields["why"] == act.LEFT:  # it handed its samples over, whatever became of an earlier link
                del self._gone[fields["peer"]]
        self.on_trace(kind, fields)

    def _lost(self, commit: act.Commit) -> dict[str, int]:
        """The samples that went with peers that are gone: what each had told of in this epoch."""
        members = {seat.peer for seat in commit.members}
        gone = {peer: told for peer, told in self._gone.items() if told[0] <= commit.ballot.epoch}
        for peer in gone:
            del self._gone[peer]
        return {
            peer.hex(): samples
            for peer, (epoch, samples) in gone.items()
            if samples and epoch == commit.ballot.epoch and peer not in members
        }

    def healed(self, now: float) -> None:
        """A downloaded state was loaded: the epoch's clock starts anew."""
        self._seen = (now, 0, self._seen[2])
        self._new_epoch(now)

    def left(
        self,
        epoch: int,
        lineage: bytes,
        discarded: tuple[tuple[int, str], ...],
        links: Mapping[bytes, Link],
    ) -> RoundReport:
        """The last report of a peer that leaves: nothing was averaged, and these samples are lost."""
        total = time.monotonic() - self._epoch_start
        report = RoundReport(
            run_id=self._run_id,
            peer=self._me.hex(),
            epoch=epoch,
            attempts=0,
            leader="",
            lineage=lineage.hex(),
            members=(),
            samples=0,
            local_samples=0,
            samples_discarded=sum(samples for samples, _ in discarded),
            discarded_why=tuple(why for _, why in discarded),
            failed_members=(),
            causes=tuple(self._causes),
            seconds_calculation=total,
            seconds_waiting=0.0,
            seconds_matchmaking=0.0,
            seconds_transfer=0.0,
            seconds_commit=0.0,
            seconds_update=0.0,
            seconds_total=total,
            **_bytes(self._meter.report(links, 0.0)),
            codec=self._codec,
            finished_at=time.time(),
            discarded_samples=tuple(samples for samples, _ in discarded),
            region=self._region,
            device=self._device,
        )
        self._publish(report)
        return report

    def _new_epoch(self, now: float) -> None:
        self._epoch_start, self._is_first = now, False
        self._arrived_at = None
        self._waited = 0.0
        self._idle = self._stretched = 0.0
        self._failed.clear()
        self._causes.clear()

    def finished(
        self,
        commit: act.Commit,
        seconds_update: float,
        extra: Mapping[str, float],
        steps: int,
        discarded: tuple[tuple[int, str], ...],
        links: Mapping[bytes, Link],
        waited: float | None,
        figures: Figures | None = None,
    ) -> RoundReport:
        """The epoch was applied: its report, also handed to `publish`.

        waited: seconds that the training thread waited, when round and update ran behind it; None: it waited
        all the while. figures: of the data, with a sampler.
        """
        now = time.monotonic()
        total = now - self._epoch_start
        arrived = None if commit.late or self._arrived_at is None else self._arrived_at - self._epoch_start
        spent = phases(
            total=total,
            arrived=arrived,
            waited_before=self._waited,
            round_seconds=commit.seconds,
            update=seconds_update,
            waited=waited,
            idle=self._idle,
        )
        moved = self._meter.report(links, self._moved[1] - self._moved[0])
        stages, cost = self._sent.pop(commit.transfer, ({}, None))
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
            seconds_calculation=spent.calculation,
            seconds_waiting=spent.waiting,
            seconds_matchmaking=spent.matchmaking,
            seconds_transfer=spent.transfer,
            seconds_commit=spent.commit,
            seconds_update=spent.update,
            seconds_total=total,
            **_bytes(moved),
            **_data(figures),
            codec=self._codec,
            first_byte_at=self._moved[0],
            last_byte_at=self._moved[1],
            finished_at=time.time(),
            extra=dict(extra),
            overlapped=spent.overlapped > 0,
            seconds_overlapped=spent.overlapped,
            discarded_samples=tuple(samples for samples, _ in discarded),
            failed_attempts=tuple(self._failed),
            region=self._region,
            device=self._device,
            spared_bytes=self._freshly_spared(),
            relayed_bytes=self._freshly_relayed(),
            plan=self._plan_of(commit.transfer),
            seconds_stretched=self._stretched,
            samples_lost=self._lost(commit),
            bytes_by_stage=stages,
            egress_dollars=0.0 if cost is None else cost.dollars,
            egress_dollars_flat=0.0 if cost is None else cost.flat_dollars,
            memory=memory.report(),
            state_bytes=self.state_bytes(),
        )
        self._new_epoch(now)
        self._seen = (now, 0, steps)
        self._publish(report)
        return report


def _data(figures: Figures | None) -> dict[str, Any]:
    if figures is None:
        return {}
    return {
        "consumed": tuple(figures.consumed),
        "passes": figures.passes,
        "blocks_consumed": figures.blocks_consumed,
        "blocks_returned": figures.blocks_returned,
    }


def _bytes(moved: Moved) -> dict[str, Any]:
    """The fields that tell what was moved."""
    return {
        "bytes_sent": sum(link.bytes_sent for link in moved.links),
        "bytes_received": sum(link.bytes_received for link in moved.links),
        "links": moved.links,
        "table_bytes_sent": moved.table.sent,
        "table_bytes_received": moved.table.received,
        "other_bytes_sent": moved.others.sent,
        "host_bytes_sent": moved.table.sent_here + moved.others.sent_here,
        "other_bytes_received": moved.others.received,
    }
