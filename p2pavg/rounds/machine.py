"""The rounds machine: events in, actions out, time as a parameter, no I/O.

machine = Machine(Config(...), now)
actions = machine.handle(event, now)     # to be carried out in order
machine.next_deadline                    # when to feed Tick, if nothing happens before
"""

from __future__ import annotations

from p2pavg.rounds.ballot import Lineage, PeerId
from p2pavg.rounds.core import Config, Core, Plan
from p2pavg.rounds.counting import Counting
from p2pavg.rounds.deadlines import LOOP_LIMIT, PAUSE
from p2pavg.rounds.events import (
    Action,
    Applied,
    Discard,
    Discarded,
    Event,
    Generation,
    Healed,
    HealFailed,
    Health,
    JobDone,
    JobFailed,
    JobProgressed,
    JobRefused,
    Leave,
    Left,
    LocalProgress,
    PeerDown,
    PeerHealth,
    PeerUp,
    Received,
    Role,
)
from p2pavg.rounds.healing import Healing
from p2pavg.rounds.leading import Leading
from p2pavg.rounds.member import Member
from p2pavg.rounds.messages import (
    Aborted,
    Begin,
    Committed,
    Complain,
    Done,
    Follow,
    Inquire,
    Leaving,
    Message,
    Prepare,
    Progress,
    Promise,
    Query,
    Ready,
    Refuse,
    Stalled,
    Totals,
    Unknown,
)
from p2pavg.rounds.succession import Succession

LEAVE_S = 5.0  # at most this long for the outcome of a running round


class Machine:
    """One peer's part in all rounds."""

    health_interval = 0.1  # seconds between two Health events, and between two JobProgressed of a running job

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        epoch: int,
        lineage: Lineage,
        target: int,
        plan: Plan,
        now: float,
        role: Role = Role.TRAINER,
        history: tuple[Generation, ...] = (),
        client_only: bool = False,
        patience_s: float | None = None,
    ) -> None:
        """target: samples per epoch. plan: the members in rank order -> the parts.

        patience_s: how long stragglers are waited for; None: from measurements. A JOINER has no state yet: it
        downloads one first.
        """
        self.core = Core(
            Config(
                me,
                run_id.encode(),
                target,
                plan,
                epoch,
                lineage,
                history,
                role,
                client_only,
                patience_s,
            )
        )
        self.member = Member(self)
        self.leading = Leading(self)
        self.succession = Succession(self)
        self.counting = Counting(self)
        self.healing = Healing(self)
        self._skipped = 0.0  # how much of the clock this process did not live
        self._clock = now
        self._health: dict[PeerId, tuple[float, float]] = {}  # age and time of the last report
        self._left = False
        self.core.now = self.core.epoch_began_at = now
        self.core.resumed_at = now

    # What others may look at.

    @property
    def epoch(self) -> int:
        """Where this peer stands after its last commit."""
        return self.core.epoch

    @property
    def lineage(self) -> Lineage:
        return self.core.lineage

    @property
    def role(self) -> Role:
        """JOINER while the state is missing or being downloaded."""
        return Role.JOINER if self.core.joining is not None else self.core.role

    @property
    def target(self) -> int:
        """Samples per epoch, over all peers."""
        return self.core.target

    @target.setter
    def target(self, samples: int) -> None:
        self.core.target = samples

    @property
    def total_samples(self) -> int:
        """Samples of all peers in this lineage so far."""
        return self.core.history.total

    @property
    def leader(self) -> PeerId | None:
        return self.core.leader()

    @property
    def applied_epoch(self) -> int:
        """Where the training thread stands: behind `epoch` while averages wait for it."""
        return self.core.applied_epoch

    @property
    def history(self) -> tuple[Generation, ...]:
        """Travels with the state that this peer gives to others."""
        return tuple(self.core.history.generations)

    @property
    def next_deadline(self) -> float | None:
        """On the clock of `handle`; None: nothing is waited for."""
        return min(self.core.timers.values()) + self._skipped if self.core.timers else None

    # In.

    def handle(self, event: Event, now: float) -> list[Action]:
        """One event; the actions are to be carried out in order. `now`: seconds of a monotonic clock."""
        self._pass_time(now)
        core = self.core
        if self._left:
            return []
        self._run_timers()
        self._dispatch(event)
        for _ in range(1000):
            while core.inbox:
                self._receive(core.me, core.inbox.popleft())
            self.healing.consider()
            self.counting.consider()
            if not core.inbox:
                break
        self.counting.report()
        self.counting.watch()
        self._finish_leaving()
        actions, core.actions = core.actions, []
        return actions

    def _pass_time(self, now: float) -> None:
        """Time in which this process was stopped, or by which its clock jumped, counts for no deadline."""
        core = self.core
        expected = min([*core.timers.values(), core.now + 4 * self.health_interval]) + self._skipped
        late = now - max(expected, self._clock)
        if late > PAUSE:
            self._skipped += late
            core.resumed_at = now - self._skipped
            core.trace("paused", seconds=late)
        elif now < self._clock:
            self._skipped -= self._clock - now
        self._clock = now
        core.now = now - self._skipped

    def _run_timers(self) -> None:
        core = self.core
        due = sorted((at, name) for name, at in core.timers.items() if at <= core.now)
        for at, name in due:
            if core.timers.get(name) != at:
                continue
            del core.timers[name]
            self._on_timer(name)

    def _on_timer(self, name: str) -> None:
        match name:
            case "promise":
                self.leading.on_promise_timer()
            case "patience":
                self.leading.on_patience_timer()
            case "judge":
                self.leading.on_judge_timer()
            case "done":
                self.leading.on_done_timer()
            case "totals":
                self.counting.on_totals_timer()
            case "keepalive":
                self.counting.on_keepalive_timer()
            case "word":
                self.counting.on_word_timer()
            case "query":
                self.succession.on_query_timer()
            case "inquire":
                self.succession.on_inquire_timer()
            case "ask":
                self.healing.on_ask_timer()
            case "heal":
                self.healing.on_heal_timer()
            case "found":
                self.healing.on_found_timer()
            case _:  # grace, retry, report, settle, leave, unheard: looked at after every event
                pass

    def _dispatch(self, event: Event) -> None:
        match event:
            case Received(peer, message):
                self._received(peer, message)
            case LocalProgress():
                self._local(event)
            case JobDone():
                self.member.on_job_done(event)
            case JobProgressed():
                self.member.on_progressed(event)
            case JobRefused():
                self.member.on_job_refused(event)
            case JobFailed():
                self.member.on_job_failed(event)
            case Health(peers):
                for health in peers:
                    self._heartbeat(health)
            case PeerUp():
                self._up(event)
            case PeerDown(peer, reason):
                self._down(peer, reason)
            case Applied():
                self._applied(event)
            case Healed():
                self.healing.on_healed(event)
            case HealFailed():
                self.healing.on_heal_failed(event)
            case Discard():
                self.core.samples = 0
            case Leave():
                self._leave()
            case _:
                pass

    # Peers.

    def _up(self, event: PeerUp) -> None:
        core = self.core
        core.view.up(event)
        core.deadlines.measured_rtt(event.peer, event.rtt_s)
        self._health.pop(event.peer, None)
        core.send(event.peer, core.progress())

    def _down(self, peer: PeerId, reason: str) -> None:
        core = self.core
        if peer not in core.view:
            return
        core.view.down(peer)
        core.deadlines.forget(peer)
        core.trace("down", peer=peer, why=reason)
        self._lost(peer, reason)

    def _lost(self, peer: PeerId, why: str) -> None:
        self.leading.lost(peer, why)
        self.member.lost(peer, why)
        self.succession.lost(peer)
        self.healing.on_moved()

    def _heartbeat(self, health: PeerHealth) -> None:
        core = self.core
        facts = core.view.get(health.peer)
        if facts is None:
            return
        core.deadlines.measured_rtt(health.peer, health.rtt_s)
        before = self._health.get(health.peer)
        self._health[health.peer] = (health.heard_s, core.now)
        lived = core.now - core.resumed_at
        if (
            before is not None
            and health.heard_s < before[0]
            and not facts.silent
            and before[1] >= core.resumed_at
        ):
            core.deadlines.measured_gap(health.peer, before[0] + core.now - before[1] - health.heard_s)
        silent = min(health.heard_s, lived) > core.deadlines.silence(health.peer)
        deaf = min(health.loop_s, lived) > LOOP_LIMIT + 2 * core.deadlines.rtt(health.peer)
        if (silent or deaf) and not facts.silent:
            why = "no heartbeat" if silent else "its event loop does not turn"
            facts.silent = True
            core.trace("silent", peer=health.peer, why=why)
            self._lost(health.peer, why)
        elif facts.silent and not silent and not deaf:
            facts.silent = False
            core.trace("heard again", peer=health.peer)
            core.send(health.peer, core.progress())

    # Messages.

    def _received(self, peer: PeerId, message: Message) -> None:
        if peer in self.core.view:
            self.counting.heard(peer)
            self._receive(peer, message)

    def _receive(self, peer: PeerId, message: Message) -> None:
        match message:
            case Progress():
                self._on_progress(peer, message)
            case Totals():
                self.counting.on_totals(peer, message)
            case Follow():
                self.counting.on_follow(peer, message)
            case Prepare():
                self.member.on_prepare(peer, message)
            case Query():
                self.member.on_query(peer, message)
            case Promise():
                self.leading.on_promise(peer, message)
                self.succession.on_promise(peer, message)
            case Refuse():
                self.leading.on_refuse(peer, message)
                self.succession.on_refuse(peer, message)
            case Ready():
                self.leading.on_ready(peer, message)
            case Begin():
                self.member.on_begin(peer, message)
            case Done():
                self.leading.on_done(peer, message)
            case Stalled():
                self.leading.on_stalled(peer, message)
            case Complain():
                self.leading.on_complain(peer, message)
            case Committed():
                self.member.on_committed(peer, message)
            case Aborted():
                self.member.on_aborted(peer, message)
            case Inquire():
                self.member.on_inquire(peer, message)
            case Unknown():
                self.healing.on_unknown(peer, message)
            case Leaving():
                self._down(peer, "left the run")

    def _on_progress(self, peer: PeerId, message: Progress) -> None:
        core = self.core
        before = core.view.get(peer)
        if before is None:
            return
        knew = (before.epoch, before.lineage, before.joining)
        if before.pending and not message.pending and message.epoch == before.epoch == core.epoch:
            core.deadlines.measured_apply(peer, core.now - before.committed_at)
        core.view.told(peer, message)
        core.unheard.discard(peer)
        core.deadlines.measured_step(peer, message.step_s)
        if (message.epoch, message.lineage) == (core.epoch, core.lineage) and core.joining is None:
            if peer == core.sticky and message.leader not in (peer, None):
                core.sticky = message.leader  # it abdicates
            self.counting.on_progress(peer, message)
        elif knew != (message.epoch, message.lineage, message.joining) or message.epoch < core.epoch:
            core.send(peer, core.progress())

    # The training thread.

    def _local(self, event: LocalProgress) -> None:
        core = self.core
        core.upload_bps, core.download_bps = event.upload_bps, event.download_bps
        core.rate = event.samples_per_second
        if core.pending:
            core.boundary = False  # its samples are those before the average; it is given that next
            return
        core.samples, core.weight = event.samples, event.weight
        if event.step_seconds > 0:
            core.step_s = event.step_seconds
            core.deadlines.measured_step(core.me, event.step_seconds)
        if event.at_boundary and not core.boundary:
            core.boundary_at = core.now
        core.boundary = event.at_boundary
        if core.boundary:
            core.told_to_stop = False
            self.member.at_boundary()

    def _applied(self, event: Applied) -> None:
        core = self.core
        core.applied_epoch = event.epoch
        if not core.pending or event.epoch != core.epoch:
            return
        core.pending = False
        core.deadlines.measured_apply(core.me, core.now - core.epoch_began_at)
        core.trace("applied")
        if core.joining is None:
            core.wait_at(0)

    # Ends.

    def new_epoch(self) -> None:
        """The core stands at another epoch: whatever belonged to the last one is over."""
        self.leading.new_epoch()
        self.succession.new_epoch()
        self.counting.new_epoch()
        self.healing.new_epoch()

    def abandon_round(self, why: str) -> None:
        """Have no more part in the round of this epoch."""
        self.leading.abort(why, (), counts=False)
        self.succession.new_epoch()
        self.member.abandon(why)
        self.core.inbox.clear()

    def _leave(self) -> None:
        core = self.core
        if not core.leaving:
            core.leaving = True
            core.arm("leave", core.now + LEAVE_S)

    def _finish_leaving(self) -> None:
        core = self.core
        if not core.leaving or self._left:
            return
        if self.member.holding is not None and "leave" in core.timers:
            return
        self.abandon_round("this peer leaves")
        if core.samples:
            core.act(Discarded(core.samples, "left"))
        for facts in core.view:
            core.send(facts.peer, Leaving(core.epoch))
        core.timers.clear()
        self._left = True
        core.act(Left())
