"""The rounds machine: events in, actions out, time as a parameter, no I/O.

machine = Machine(Config(me=..., run_id=..., ...), now)
actions = machine.handle(event, now)     # to be carried out in order
machine.next_deadline                    # when to feed Tick, if nothing happens before
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.rounds.machine import events
from p2pavg.rounds.machine.actions import Action, TraceKind
from p2pavg.rounds.machine.core import Core
from p2pavg.rounds.machine.counting import Counting
from p2pavg.rounds.machine.decisions import Decisions
from p2pavg.rounds.machine.departure import Departure
from p2pavg.rounds.machine.events import Event
from p2pavg.rounds.machine.healing import Healing
from p2pavg.rounds.machine.leading import Leading
from p2pavg.rounds.machine.member import Member
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.memory.state import MemberState, state_of
from p2pavg.rounds.machine.newcomers import Newcomers
from p2pavg.rounds.machine.others import Peers
from p2pavg.rounds.machine.own_thread import Trainer
from p2pavg.rounds.machine.refusals import Refusals
from p2pavg.rounds.machine.reporting import Leaders, Measurements, Reporting
from p2pavg.rounds.machine.rules.deadlines import PAUSE, Timer
from p2pavg.rounds.machine.stretching import Stretching
from p2pavg.rounds.machine.succession import Succession
from p2pavg.rounds.machine.transfer import TransferRules
from p2pavg.rounds.machine.waiting import Waiting
from p2pavg.rounds.protocol import messages
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Message
from p2pavg.rounds.protocol.roles import Generation, Role


class Machine:
    """One peer's part in all rounds."""

    health_interval = 0.1  # seconds between two Health events, and between two JobProgressed of a running job

    def __init__(self, config: Config, now: float) -> None:
        """now: seconds of a monotonic clock."""
        self.core = Core(config, now)
        self.member = Member(self)
        self.leading = Leading(self)
        self.refusals = Refusals(self)
        self.transfer = TransferRules(self)
        self.succession = Succession(self)
        self.counting = Counting(self)
        self.reporting = Reporting(self)
        self.leaders = Leaders(self)
        self.waiting = Waiting(self)
        self.links = Measurements(self)
        self.healing = Healing(self)
        self.decisions = Decisions(self)
        self.peers = Peers(self)
        self.trainer = Trainer(self)
        self.departure = Departure(self)
        self.newcomers = Newcomers(self)
        self.stretching = Stretching(self)
        self._events = self._event_table()
        self._messages = self._message_table()
        self._timers = self._timer_table()
        self._skipped = 0.0  # seconds of the clock in which this process was stopped
        self._clock = now
        if config.role is Role.TRAINER:
            self.core.wait_at(0)

    # For callers to read.

    @property
    def epoch(self) -> int:
        """Where this peer stands after its last commit."""
        return self.core.here.epoch

    @property
    def lineage(self) -> Lineage:
        return self.core.here.lineage

    @property
    def role(self) -> Role:
        """JOINER while the state is missing or being downloaded."""
        return Role.JOINER if self.core.here.joining is not None else self.core.here.role

    @property
    def state(self) -> MemberState:
        """What this peer is doing in the epoch."""
        return state_of(self.core.here, self.core.holding)

    @property
    def target(self) -> int:
        """Samples per epoch, over all peers."""
        return self.core.target

    @target.setter
    def target(self, samples: int) -> None:
        self.core.aim(samples)

    @property
    def counted(self) -> bool:
        """A round has begun with what the training thread waits with: it must wait for the outcome."""
        held = self.core.holding
        return held is not None and held.begun and held.ready

    @property
    def samples(self) -> int:
        """Samples of the training thread that are in no average yet, as it last told."""
        return self.core.own.samples

    @property
    def total_samples(self) -> int:
        """Samples of all peers in this lineage so far."""
        return self.core.history.total

    @property
    def level(self) -> bool:
        """Nobody that has the state is known to be ahead of this peer."""
        core = self.core
        return all(
            f.epoch <= core.here.epoch or f.peer in core.linked.doubted for f in core.linked.trainers()
        )

    @property
    def alone(self) -> bool:
        """Nobody else that has the state of the run is in view."""
        return not any(True for _ in self.core.linked.trainers())

    def has_reached(self, peer: PeerId, epoch: int, lineage: Lineage) -> bool:
        """Whether a peer with the state is known to stand at (epoch, lineage), or at a later epoch."""
        facts = self.core.linked.get(peer)
        if facts is None or facts.silent or facts.joining or facts.role is not Role.TRAINER:
            return False
        return facts.epoch > epoch or facts.stands_at(epoch, lineage)

    @property
    def leader(self) -> PeerId | None:
        return self.core.leader()

    @property
    def silent(self) -> set[PeerId]:
        """Peers with a link, from which nothing is heard."""
        return {facts.peer for facts in self.core.linked if facts.silent}

    @property
    def company(self) -> int:
        """How many others train, have told so over their links, and are not joining. Any thread may ask."""
        return self.core.linked.company()

    @property
    def applied_epoch(self) -> int:
        """Where the training thread stands: behind `epoch` while averages wait for it."""
        return self.core.here.applied_epoch

    @property
    def history(self) -> tuple[Generation, ...]:
        """The generations that travel with the state that this peer gives to others."""
        return tuple(self.core.history.generations)

    def has_been_at(self, epoch: int, lineage: Lineage) -> bool:
        """Whether samples that belong to (epoch, lineage) may count here: at most one epoch old."""
        core = self.core
        if (
            core.here.departing
            or self.role is not Role.TRAINER
            or not core.here.epoch - 1 <= epoch <= core.here.epoch
        ):
            return False
        return (epoch, lineage) == (core.here.epoch, core.here.lineage) or core.history.knows(epoch, lineage)

    @property
    def next_deadline(self) -> float | None:
        """The time on the clock of `handle` at which to feed Tick; None: no timer is armed."""
        return min(self.core.timers.values()) + self._skipped if self.core.timers else None

    # In.

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event. Returns the actions to carry out, in order. `now`: seconds of a monotonic clock."""
        core = self.core
        timers = core.timers
        first = min(timers.values()) if timers else math.inf
        self._pass_time(now, first)
        if self.departure.left:
            return []
        if first <= core.now:
            self._run_timers()
        if self.departure.announced:
            self.departure.on_announced(event)
            return core.take_actions()
        handler = self._events.get(type(event))
        if handler is not None:  # a Tick has none
            handler(event)
        for _ in range(1000):
            while core.inbox:
                self._receive(core.me, core.inbox.popleft())
            self.links.consider()
            self.healing.consider()
            self.counting.consider()
            self.member.consider()
            if not core.inbox:
                break
        self.reporting.report()
        self.waiting.watch()
        self.departure.consider()
        return core.take_actions()

    def _pass_time(self, now: float, deadline: float) -> None:
        """Let time pass. Time in which this process was stopped, or by which its clock jumped, counts
        for no deadline.
        """
        core = self.core
        expected = min(deadline, core.now + 4 * self.health_interval) + self._skipped
        late = now - max(expected, self._clock)
        if late > PAUSE:
            self._skipped += late
            core.come_back(now - self._skipped)
            core.trace(TraceKind.PAUSED, seconds=late)
        elif now < self._clock:
            self._skipped -= self._clock - now
        self._clock = now
        core.live(now - self._skipped)

    def _run_timers(self) -> None:
        core = self.core
        due = sorted((at, name) for name, at in core.timers.items() if at <= core.now)
        for at, name in due:
            if core.timers.get(name) != at:
                continue
            core.disarm(name)
            handler = self._timers.get(name)
            if handler is not None:
                handler()

    def _received(self, event: events.Received) -> None:
        if event.peer in self.core.linked:
            self.waiting.heard(event.peer)
            self._receive(event.peer, event.message)

    def _receive(self, peer: PeerId, message: Message) -> None:
        for handler in self._messages[type(message)]:
            handler(peer, message)

    # Who handles what.

    def _event_table(self) -> Mapping[type[Any], Callable[[Any], None]]:
        return {
            events.Received: self._received,
            events.LocalProgress: self.trainer.on_progress,
            events.JobDone: self.member.on_job_done,
            events.JobProgressed: self.member.on_progressed,
            events.JobRefused: self.member.on_job_refused,
            events.JobFailed: self.member.on_job_failed,
            events.Health: self.peers.on_health,
            events.LinksMeasured: self.links.on_measured,
            events.PeerUp: self.peers.on_up,
            events.PeerDown: self.peers.on_down,
            events.Apart: self.peers.on_apart,
            events.Moved: self.peers.on_moved,
            events.Applied: self.trainer.on_applied,
            events.Healed: self.healing.on_healed,
            events.Followed: self.healing.on_followed,
            events.Donors: self.healing.on_donors,
            events.Level: self.healing.on_level,
            events.HealFailed: self.healing.on_heal_failed,
            events.Discard: self.trainer.on_discard,
            events.Inherited: self.departure.on_inherited,
            events.Leave: self.departure.on_leave,
        }

    def _message_table(self) -> Mapping[type[Any], tuple[Callable[[PeerId, Any], None], ...]]:
        return {
            messages.Progress: (self.peers.on_progress,),
            messages.Totals: (self.peers.on_totals, self.counting.on_totals),
            messages.Follow: (self.leaders.on_follow,),
            messages.Prepare: (self.peers.on_prepare, self.member.on_prepare),
            messages.Query: (self.member.on_query,),
            messages.Promise: (self.leading.on_promise, self.succession.on_promise),
            messages.Refuse: (self.refusals.on_refuse, self.succession.on_refuse),
            messages.Ready: (self.leading.on_ready, self.peers.on_ready),
            messages.Unready: (self.leading.on_unready,),
            messages.Begin: (self.member.on_begin,),
            messages.Begun: (self.member.on_begun,),
            messages.Done: (self.transfer.on_done,),
            messages.Stalled: (self.transfer.on_stalled,),
            messages.Complain: (self.transfer.on_complain,),
            messages.Committed: (self.decisions.on_committed,),
            messages.Aborted: (self.decisions.on_aborted,),
            messages.Inquire: (self.decisions.on_inquire,),
            messages.Unknown: (self.healing.on_unknown,),
            messages.CatchUp: (self.newcomers.on_catch_up,),
            messages.Links: (self.links.on_links,),
            messages.Departing: (self.peers.on_departing,),
        }

    def _timer_table(self) -> Mapping[Timer, Callable[[], None]]:
        """The timers that are looked at after every event have no handler here: grace, held, leave, report,
        retry, settle, stretch, unheard."""
        return {
            Timer.PROMISE: self.leading.on_promise_timer,
            Timer.PATIENCE: self.leading.on_patience_timer,
            Timer.JUDGE: self.transfer.on_judge_timer,
            Timer.DONE: self.transfer.on_done_timer,
            Timer.TOTALS: self.counting.on_totals_timer,
            Timer.LAPSE: self.counting.on_totals_timer,
            Timer.KEEPALIVE: self.counting.on_keepalive_timer,
            Timer.VAIN: self.waiting.on_vain_timer,
            Timer.WORD: self.waiting.on_word_timer,
            Timer.OTHERS: self.decisions.on_others_timer,
            Timer.QUERY: self.succession.on_query_timer,
            Timer.INQUIRE: self.succession.on_inquire_timer,
            Timer.ADRIFT: self.succession.on_query_timer,
            Timer.LINKS: self.peers.on_links_timer,
            Timer.APART: self.peers.on_apart_timer,
            Timer.ASK: self.healing.on_ask_timer,
            Timer.HEAL: self.healing.on_heal_timer,
            Timer.ORPHANED: self.healing.on_orphaned_timer,
        }

    # Ends.

    def new_epoch(self) -> None:
        """The core stands at another epoch: all that belonged to the last epoch is over."""
        self.leading.new_epoch()
        self.succession.new_epoch()
        self.counting.new_epoch()
        self.leaders.new_epoch()
        self.healing.new_epoch()
        self.newcomers.new_epoch()
        self.peers.new_epoch()
        self.stretching.moved()

    def abandon_round(self, why: str) -> None:
        """Have no more part in the round of this epoch."""
        self.leading.abort(Cause.HEALING, (), why, counts=False)
        self.succession.abandon()
        self.member.abandon(why)
        self.core.inbox.clear()
