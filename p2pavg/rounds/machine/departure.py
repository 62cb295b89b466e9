"""A departure on purpose: first the last round's outcome, then the samples go to a peer that stays."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import Discarded, HandOver, Left, TraceKind
from p2pavg.rounds.machine.events import Discard, Event, HandedOver, Inherited, Leave, PeerUp
from p2pavg.rounds.machine.rules.camps import Facts
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.machine.rules.plausible import plausible_handover
from p2pavg.rounds.protocol.ballot import Held, Lineage, PeerId, Stage
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.messages import Committed, Departing
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Acceptance(enum.Enum):
    """The answer to a handover that is offered to this peer."""

    TAKEN = "taken"
    LATER = "later"  # this peer is on its way to where the samples count
    BEHIND = "behind"  # the samples are too old here
    COUNTED = "counted"  # the samples are in an average already
    UNKNOWN = "unknown"  # the receiver has all of the handover, and did not say whether it took it
    NEVER = "never"


class Departure:
    """The departure of this peer, and how far it is.

    A departing peer ends the round that it is in, as long as the notice allows. Then it tells everybody, so
    that no peer counts on it any more, and has its accumulated samples carried to a peer of its lineage,
    which counts them as its own.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.announced = False
        self.left = False
        self._hand_over = False
        self._outrun = False  # whether receivers said that the samples are too old
        self._unknown = False  # whether a receiver may have the samples

    def on_leave(self, event: Leave) -> None:
        """The peer leaves: from now on it takes part in no new round."""
        core = self.core
        if not core.here.departing:
            core.here.leave()
            self._hand_over = event.hand_over
            core.arm(Timer.LEAVE, core.now + event.notice_s)

    def consider(self) -> None:
        """Called after every event: is the last round over?"""
        core = self.core
        if not core.here.departing or self.announced:
            return
        undecided = self._in_round() or (self._hand_over and core.here.pending)
        if undecided and Timer.LEAVE in core.timers:
            return
        self.machine.abandon_round("this peer leaves")
        self.announced = True
        deadline = core.timers.get(Timer.LEAVE)
        core.disarm_all()
        for facts in core.linked:
            self._announce_to(facts.peer)
        receivers, offered = self._receivers(), core.own.offered
        self._take_off(self._known_to_count(offered))
        if self._hand_over and not undecided and deadline is not None and core.own.samples and receivers:
            core.arm(Timer.LEAVE, deadline)
            core.act(HandOver(receivers, core.own.samples, tuple(offered.items())))
        else:
            self._go()

    def _in_round(self) -> bool:
        """Whether a round may still have something of this peer. Without a handover the training thread comes
        to no further boundary, so that nothing is declared for a ballot that has not begun.
        """
        held = self.core.holding
        return held is not None and (held.begun or held.wait != 0 or self._hand_over)

    def _announce_to(self, peer: PeerId) -> None:
        self.core.send(peer, Departing(self.core.here.epoch, self._last_words()))

    def _last_words(self) -> tuple[Held, ...]:
        """The answers of this peer to a successor: the last average here, and the last ballot since."""
        core, dropped = self.core, self.machine.member.dropped
        words = [
            Held(o.ballot, Stage.COMMITTED, True, o.digests, (), o.weights, o.samples)
            for o in core.outcomes.values()
            if isinstance(o, Committed)
        ]
        since = [dropped] if dropped and dropped.ballot.standing == core.here.standing else []
        return (*words[-1:], *since)

    def _known_to_count(self, offered: Collection[int]) -> int | None:
        """The transfer that was committed with samples of this peer, and that this peer could not
        apply; None: none.
        """
        committed = (o.ballot.transfer for o in self.core.outcomes.values() if isinstance(o, Committed))
        return next((transfer for transfer in committed if transfer in offered), None)

    def _take_off(self, counted: int | None) -> None:
        """The samples of this transfer are averaged. Samples counted since are lost, as they are in one
        sum with them.
        """
        core = self.core
        if counted is None:
            return
        averaged = min(core.own.samples, core.own.offered.get(counted, 0))
        core.trace(TraceKind.COUNTED, samples=averaged)
        core.own.take_off(averaged)
        if averaged:
            self._hand_over = False

    def on_announced(self, event: Event) -> None:
        """The departure is announced: only the samples and the end of the notice matter any more."""
        if isinstance(event, HandedOver):
            if event.taken:
                self.core.trace(TraceKind.HANDED_OVER, samples=self.core.own.samples)
                self.core.own.drop()
            self._take_off(event.counted)
            self._outrun, self._unknown = event.behind, event.unknown
            self._go()
        # The training thread came with fewer samples than it had, and named the rest as lost.
        elif isinstance(event, Discard):
            self.core.own.drop()
        elif isinstance(event, PeerUp):
            self.core.linked.up(event)
            self._announce_to(event.peer)
        elif Timer.LEAVE not in self.core.timers:
            self._go()

    def acceptance(self, epoch: int, lineage: Lineage, offered: Collection[int]) -> Acceptance:
        """Whether samples that were accumulated at (epoch, lineage) count here.

        offered: transfers that had these samples, and whose outcome the departing peer does not know.
        """
        core, held = self.core, self.machine.core.holding
        if core.here.departing or (core.here.role is not Role.TRAINER and core.here.joining is None):
            return Acceptance.NEVER
        if core.here.joining is None and core.history.counted(epoch, offered) is not None:
            return Acceptance.COUNTED
        if self.machine.has_been_at(epoch, lineage):
            return Acceptance.LATER if held is not None and held.transfer in offered else Acceptance.TAKEN
        here, _ = core.here.standing
        if here > epoch + 1:
            return Acceptance.BEHIND
        return Acceptance.LATER if here < epoch or core.here.joining is not None else Acceptance.NEVER

    def can_have(self, samples: int) -> bool:
        """Whether a departing peer can have accumulated so many samples, in this epoch and in the one
        before.
        """
        core = self.core
        elapsed = core.now - core.here.began_at
        epochs = 2.0 + elapsed / core.deadlines.usual_epoch(elapsed)
        target = core.plausible_target
        return plausible_handover(samples, core.own.samples, core.own.pace.samples, target, epochs)

    def on_inherited(self, event: Inherited) -> None:
        """This peer answers for samples that the departing peer offered as for its own."""
        core = self.core
        core.history.inherit(event.epoch, event.offered)
        if event.epoch == core.here.epoch:
            for transfer, samples in event.offered:
                core.own.inherit(transfer, samples)

    def _receivers(self) -> tuple[PeerId, ...]:
        """Peers that stand where this one stands, the nearest first; then those ahead, or yet to come.

        What this peer knows of receivers may be old: each says itself whether it takes the samples.
        """
        core = self.core
        if core.here.role is not Role.TRAINER:
            return ()
        here = core.stands_here

        def distance(facts: Facts) -> tuple[bool, bool, bool, bool, float, PeerId]:
            absent = facts.silent or facts.joining or facts.role is not Role.TRAINER
            behind = facts.epoch < core.here.epoch
            return absent, behind, not here(facts), facts.pending, core.deadlines.rtt(facts.peer), facts.peer

        return tuple(facts.peer for facts in sorted(filter(self._may_take, core.linked), key=distance))

    def _may_take(self, facts: Facts) -> bool:
        core = self.core
        rival = facts.epoch == core.here.epoch and facts.lineage != core.here.lineage
        return facts.role is not Role.WATCHER and facts.epoch <= core.here.epoch + 1 and not rival

    def _go(self) -> None:
        core = self.core
        if core.own.samples:
            behind = (
                core.here.role is not Role.TRAINER
                or core.here.joining is not None
                or self._outrun
                or any(facts.epoch > core.here.epoch + 1 for facts in core.linked.trainers())
            )
            why = Loss.LEFT_BEHIND if behind else Loss.LEFT
            core.act(Discarded(core.own.samples, Loss.LEFT_PERHAPS if self._unknown else why))
        core.disarm_all()
        self.left = True
        core.act(Left())
