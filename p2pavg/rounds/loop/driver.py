"""Driver: the thin asyncio shell around the rounds machine. Everything here runs on the event-loop thread.

The driver feeds events (links, messages, engine, training thread, timers) to the machine, whose actions the
performer carries out; neither decides anything about rounds itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from p2pavg import codecs
from p2pavg.allreduce.jobs import Jobs
from p2pavg.errors import ClosedError, ProtocolError
from p2pavg.report import RoundReport
from p2pavg.rounds.loop import handover
from p2pavg.rounds.loop.attempts import Attempts
from p2pavg.rounds.loop.backlog import Backlog
from p2pavg.rounds.loop.boundary import Boundary
from p2pavg.rounds.loop.claims import KINDS as CLAIMS
from p2pavg.rounds.loop.claims import Claims
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.loop.departure import TrainerDeparture
from p2pavg.rounds.loop.feeder import Feeder
from p2pavg.rounds.loop.guard import failure, guarded
from p2pavg.rounds.loop.handover import Handovers, Offers
from p2pavg.rounds.loop.hello import introduced
from p2pavg.rounds.loop.joining import followed
from p2pavg.rounds.loop.performer import Performer
from p2pavg.rounds.loop.state_transfer import States
from p2pavg.rounds.loop.supply import Supply
from p2pavg.rounds.loop.surroundings import Surroundings
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.protocol import wire
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.roles import Generation
from p2pavg.rounds.session import Session
from p2pavg.rounds.state.exchange import KINDS
from p2pavg.rounds.training import (
    Average,
    Contribution,
    Heal,
    Inheritance,
    KeepGoing,
    Outcome,
    TrainingSpec,
)
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.handshake import minor_ahead
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")


class Driver:
    """One training session's rounds."""

    def __init__(
        self, peer: Surroundings, session: Session, spec: TrainingSpec, machine: Machine, recorder: Recorder
    ) -> None:
        self._peer = peer
        self._session = session
        self._spec = spec
        self.machine = machine
        self.recorder = recorder
        codec = codecs.get(spec.compression)
        self._jobs = Jobs(peer.engine, codec, spec.numel, spec.allocate, spec.feedback)
        self._loop = asyncio.get_running_loop()
        supply = Supply(self._loop, self._jobs, self.job_refused, self.broken)
        attempts = Attempts(peer.peer_id, peer.links, self._jobs, supply, spec.exact)
        disk = None if spec.saving is None else spec.saving.checkpoints.directory
        self._deliveries = Deliveries(session, Backlog(directory=disk))
        self._gauges = Gauges(peer.engine, peer.links, self._jobs)
        self._feeder = Feeder(machine, lambda action: self._performer.perform(action), self.broken)
        self._boundary = Boundary(
            session,
            self._deliveries,
            machine,
            recorder,
            self._gauges,
            self.feed,
            lambda: self.departure.waiting,
        )
        self._beat: asyncio.TimerHandle | None = None
        self._discarded: list[tuple[int, str]] = []
        self._dropped = 0  # samples that the training thread had when it loaded a state
        self.handovers = Handovers(
            peer.engine,
            peer.links,
            codec,
            spec.numel,
            lambda *what: machine.departure.acceptance(*what) if spec.inherits else Acceptance.NEVER,
            machine.core.history.counted,
            machine.departure.can_have,
            self._inherit,
        )
        self.states = States(
            peer.engine,
            peer.links,
            peer.identity,
            session,
            spec,
            machine,
            self._deliveries,
            self.feed,
            self._boundary.deliver,
            lambda: self.moving,
            self.broken,
        )
        recorder.spared = self.states.spared
        recorder.state_bytes = lambda: self.states.state_bytes
        self.departure = TrainerDeparture(
            session,
            self._deliveries,
            self.handovers,
            self.states,
            machine,
            recorder,
            self._gauges,
            self._discarded,
            self.feed,
            self._boundary.release,
        )
        self._performer = Performer(
            peer.links,
            session,
            machine,
            self._jobs,
            attempts,
            self._deliveries,
            self._boundary,
            self._gauges,
            recorder,
            self.states,
            self.departure,
            self._discarded,
            self.feed,
        )
        self._claims = Claims(peer.links, spec.drawing)
        self._closed = False
        session.standing = session.next_standing = (machine.epoch, machine.lineage)

    def start(self) -> None:
        """Begin to beat. Links that are already up are told to the machine by the caller."""
        self._beats()

    def close(self) -> None:
        """Stop; whoever waits in `arrive` gets ClosedError from the session's failure."""
        self._closed = True
        self._feeder.close()
        if self._beat is not None:
            self._beat.cancel()
        self.departure.close()
        self.states.close()
        self.handovers.close()
        self._jobs.cancel_all()

    @property
    def moving(self) -> bool:
        """Whether gradients flow now."""
        return bool(self._jobs.running())

    @property
    def upload_bps(self) -> float:
        """What this peer sent while gradients flowed, bit/s; 0.0: not measured yet."""
        return self._gauges.upload_bps

    @guarded
    def tell_history(self, answer: Future[tuple[Generation, ...]]) -> None:
        """The training thread asks what led here."""
        answer.set_result(self.machine.history)

    @guarded
    def set_target(self, samples: int) -> None:
        """Samples that make an epoch from now on."""
        self.machine.target = samples
        self.feed(ev.Tick())

    def fail(self, error: BaseException) -> None:
        """The training thread gets this error now or at its next boundary."""
        self._session.fail(error)
        self._deliveries.fail(error)

    def broken(self, error: Exception) -> None:
        """What nobody expected was raised on this thread: all that wait, and all that come, are told."""
        if self._closed:
            return
        logger.error("averaging ends, as something failed that should not", exc_info=error)
        self.close()
        self.fail(failure(error))
        self.departure.left.set()
        self._peer.broken()

    # ------------------------------------------------------------------------------ the training thread

    @guarded
    def progress(self) -> None:
        """The training thread counted; tell the machine."""
        if not self._closed:
            self._boundary.tell()

    @guarded
    def claimed(self) -> None:
        """The training thread draws samples without a lease."""
        self._claims.tell()

    @guarded
    def arrived(self, contribution: Contribution, answer: Future[Outcome]) -> None:
        """The training thread waits at a boundary."""
        if self._closed:
            closed = ClosedError("this peer is closed; build a new optimizer to train on")
            answer.set_exception(self._session.failure or closed)
            return
        if answer.done():  # it was withdrawn from another thread before it came here
            return
        deliveries = self._deliveries
        deliveries.wait(contribution, answer)
        self.recorder.arrived(time.monotonic())
        if self._boundary.give_next() or deliveries.give_inheritance():
            return
        self._boundary.tell()

    @guarded
    def withdrawn(self, answer: Future[Outcome]) -> None:
        """The training thread waits no longer, if its contribution is not in use."""
        if not self._deliveries.waits_with(answer):
            if not answer.done():  # it never came here
                answer.set_result(KeepGoing())
        elif not self.machine.counted:
            self._boundary.release()

    @guarded
    def departing(self, contribution: Contribution, notice_s: float, answer: Future[Outcome]) -> None:
        """The training thread waits at its last boundary."""
        if self._closed:
            answer.set_result(KeepGoing())
            return
        self.departure.arrived(contribution, notice_s, answer, self._boundary.tell)

    def _inherit(self, inheritance: Inheritance, epoch: int, offered: Offers) -> None:
        self.feed(ev.Inherited(epoch, offered))
        self._deliveries.put_inheritance(inheritance)
        self._deliveries.refresh_attention()

    @guarded
    def applied(
        self,
        seconds_update: float,
        extra: Mapping[str, float],
        waited: float | None,
        recorded: Future[RoundReport | None],
    ) -> None:
        """The training thread has loaded or stepped what it was given."""
        given = None if self._closed else self._deliveries.applied()
        if given is None:
            recorded.set_result(None)
            return
        report = None
        outcome, commit = given
        if commit is not None and isinstance(outcome, Average):
            discarded, steps, drawing = tuple(self._discarded), self._session.steps, self._spec.drawing
            report = self.recorder.finished(
                commit,
                seconds_update,
                extra,
                steps,
                discarded,
                self._peer.links,
                waited,
                None if drawing is None else drawing.figures(commit.note),
            )
            self._discarded.clear()
            self.states.applied(commit.ballot.epoch + 1)
            self.feed(
                followed(commit) if commit.following else ev.Applied(commit.ballot.epoch + 1, commit.lineage)
            )
        elif isinstance(outcome, Heal):
            self.recorder.healed(time.monotonic())
            self._jobs.healed()
            inherited = self._deliveries.drop_inheritances()
            if inherited:
                self._discarded.append((inherited, Loss.HEALED))
            state, dropped = outcome.state, self._dropped
            self._dropped = 0
            self.feed(ev.Healed(state.epoch, state.lineage, outcome.history, dropped))
        recorded.set_result(report)
        self._peer.standing_changed()
        if commit is None or self.machine.samples != self._session.samples():
            self.progress()

    @guarded
    def discarded(self, samples: int, why: str) -> None:
        """The training thread dropped samples."""
        if why == Loss.HEALED:
            self._dropped = samples  # the machine tells how many of them are in no average
        else:
            self._discarded.append((samples, why))
            self.feed(ev.Discard(why))

    @guarded
    def refused(self, samples: int, why: str) -> None:
        """The training thread does not use the samples of a peer that left."""
        self._discarded.append((samples, why))

    # ----------------------------------------------------------------------------------------- feeding

    def feed(self, event: ev.Event) -> None:
        """Hand one event to the machine and carry out what it asks, after the events that wait already."""
        self._feeder.feed(event)

    @guarded
    def _beats(self) -> None:
        """The regular beat: local progress, health of links, progress of jobs."""
        if self._closed:
            return
        self._peer.engine.note_loop()
        self._session.leads = self.machine.leader == self._peer.peer_id
        self.feed(self._gauges.health())
        self._gauges.measure_rates(downloading=self._deliveries.downloading)
        self.recorder.observe(self._peer.links, moving=self.moving)
        for event in (*self._gauges.jobs(), self._gauges.new_links()):
            if event is not None:
                self.feed(event)
        self.states.look()
        self.progress()
        self._beat = self._loop.call_later(self.machine.health_interval, self._beats)

    # ------------------------------------------------------------------------------------- links, engine

    @guarded
    def link_up(self, link: Link) -> None:
        """A control link is ready."""
        self.feed(introduced(link.peer_id, link.hello, link.rtt, relayed=link.way is Way.RELAYED))
        self._claims.meet(link)

    @guarded
    def link_down(self, link: Link, reason: str) -> None:
        """A link is gone."""
        self.states.link_down(link.id, link.peer_id)
        self.handovers.link_down(link.id)
        self.feed(ev.PeerDown(link.peer_id, reason))

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """A control message that belongs to the rounds. Raises ProtocolError when it is malformed."""
        kind, minor = message.get("t"), minor_ahead(link.hello)
        if kind in wire.NAMES:
            self.feed(ev.Received(link.peer_id, wire.from_dict(message, newer=minor > 0, older=minor < 0)))
        elif kind in KINDS:
            self.states.message(link, message)
        elif kind in handover.KINDS:
            self.handovers.message(link, message)
        elif kind in CLAIMS:
            self._claims.message(link, message)
        elif minor > 0:
            logger.debug("a later version's message %r counts for nothing here", kind)
        else:
            raise ProtocolError("a control message is of an unknown type")

    @guarded
    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        """Engine event."""
        job = self._jobs.get(transfer)
        ranks: tuple[ev.RankProgress, ...] = ()
        if job is not None:
            progress = self._jobs.progress(transfer)
            self.recorder.moved(progress)
            ranks = self._gauges.ranks(job, progress)
        self.feed(ev.JobDone(transfer, digests, ranks))  # before the links: all members wait for the last one
        measured = self._gauges.fresh_links()
        if measured is not None:
            self.feed(measured)

    @guarded
    def blob_chunk(self, transfer: int, chunk: int) -> None:
        """Engine event."""
        if not self.handovers.chunk(transfer):
            self.states.arrived(transfer, chunk)

    @guarded
    def blob_sent(self, link: int, transfer: int) -> None:
        """Engine event."""
        self.handovers.sent(link, transfer)
        self.states.sent(link, transfer)

    @guarded
    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        """Engine event."""
        job = self._jobs.get(transfer)
        if job is not None and rank == job.rank:
            self._session.refusal = why
        self.feed(ev.JobRefused(transfer, rank, why))
