"""Performer: carries out what the rounds machine asks: messages, jobs, averages, and where to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from p2pavg.allreduce.jobs import Jobs
from p2pavg.identity import short_id
from p2pavg.rounds.loop import notices
from p2pavg.rounds.loop.attempts import Attempts
from p2pavg.rounds.loop.boundary import Boundary
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.loop.departure import TrainerDeparture
from p2pavg.rounds.loop.state_transfer import States
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.causes import FORGIVABLE, OFFENCES
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Average
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")


class Performer:
    """The actions of one machine, carried out one by one, on the loop thread."""

    def __init__(
        self,
        links: Mapping[bytes, Link],
        session: Session,
        machine: Machine,
        jobs: Jobs,
        attempts: Attempts,
        deliveries: Deliveries,
        boundary: Boundary,
        gauges: Gauges,
        recorder: Recorder,
        states: States,
        departure: TrainerDeparture,
        discarded: list[tuple[int, str]],
        feed: Callable[[ev.Event], None],
    ) -> None:
        """discarded: samples that are in no average, each with the reason, for the next report."""
        self._links = links
        self._session = session
        self._machine = machine
        self._jobs = jobs
        self._attempts = attempts
        self._deliveries = deliveries
        self._boundary = boundary
        self._gauges = gauges
        self._recorder = recorder
        self._states = states
        self._departure = departure
        self._discarded = discarded
        self._feed = feed

    def perform(self, action: act.Action) -> None:
        """Carry out one action; what fails is fed to the machine."""
        match action:
            case act.Send(peer, message):
                link = self._links.get(peer)
                if link is not None:
                    link.send(wire.to_dict(message))
            case act.Trace(kind, fields):
                self._recorder.trace(kind, fields, time.monotonic())
            case act.OpenJob():
                self._recorder.opened(action, time.monotonic())
                self._answer(self._attempts.open(action))
            case act.BeginJob():
                self._gauges.hold_back()
                self._answer(self._attempts.begin(action, self._deliveries.contribution))
            case act.CancelJob(transfer, why):
                self._jobs.cancel(transfer)
                self._recorder.attempt_failed(transfer, why, time.monotonic())
                logger.info("round attempt void: %s", why)
            case act.Commit():
                self._commit(action)
            case act.RoundFailed(epoch, why, blamed):
                self._session.vain = why
                if not self._machine.core.config.weighted:  # else whoever called says what it does about it
                    logger.warning(
                        "epoch %d: no average (%s); training goes on, the samples are kept", epoch, why
                    )
                self._recorder.round_failed(why, blamed)
                self._deliveries.stopping = False
                self._boundary.resume()
            case act.StartHeal():
                self._states.heal(action)
            case act.StopHeal(why):
                self._states.stop_heal(why)
            case act.WaitAt(others):
                self._session.set_stop(others, self._machine.target)
                self._deliveries.refresh_attention()
            case act.Stop():
                self._deliveries.stopping = True
                self._deliveries.refresh_attention()
            case act.Resume():
                self._deliveries.stopping = False
                self._deliveries.refresh_attention()
                self._boundary.resume()
            case act.Hold() | act.Stretch() | act.Orphaned():
                notices.tell(action)
            case act.Blame(peer, why):
                self._recorder.blamed(peer, why)
                logger.info("peer %s failed this round: %s", short_id(peer), why)
            case act.Discarded(samples, why):
                self._discarded.append((samples, why))
            case act.HandOver():
                self._departure.hand_over(action)
            case act.Left():
                self._departure.leave(self._links)

    def _answer(self, event: ev.JobFailed | None) -> None:
        if event is not None:
            self._feed(event)

    def _commit(self, commit: act.Commit) -> None:
        job = self._jobs.finish(commit.transfer)
        self._recorder.committed(commit, job.sent_by_stage())
        self._deliveries.stopping = False
        average = Average(
            epoch=commit.ballot.epoch,
            samples=sum(commit.samples),
            members=len(commit.members),
            late=commit.late,
            result=job.encoded(),
            note=commit.note,
            rank=job.rank,
            hindered=any(cause in OFFENCES - FORGIVABLE for _, cause in commit.failed),
        )
        self._deliveries.put(average, commit)
        self._states.committed(commit, average)
        self._boundary.deliver()
