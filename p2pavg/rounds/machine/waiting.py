"""The peer whose word this one waits for, and the end of such a wait: each wait has a deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.protocol.ballot import Ballot, PeerId, Stage

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine

MOST_VAIN = 4  # attempts of one leader that may fail in an epoch, before others lead
IDLE_WORDS = 2.0  # times the deadline for a leader's word: so long a leader may only say that it is at work
IDLE_TRANSFERS = 8.0  # times the own transfer: so much longer the transfers of others may take
MOST_PATIENCE_S = 60.0  # seconds that a leader may wait for stragglers, whatever an epoch takes


class Waiting:
    """Waits for a leader, or for the peer that decides the ballot that this peer holds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self._deposed_at = -math.inf  # when a leader was last deposed for keeping this peer waiting
        # Whose word about which ballot this peer waits for, and since when.
        self._wait: tuple[PeerId | None, Ballot | None] = None, None
        self._since = 0.0

    def let_go(self) -> None:
        """This peer is left out of its epoch: no wait of its training thread leads to an average."""
        core = self.core
        if core.here.joining is not None:
            return
        if core.leader() is None:
            self.machine.decisions.fail("nobody is left to average without this peer")
        if core.own.boundary and core.out:
            core.resume()  # the epoch goes on without this peer

    def awaited(self) -> PeerId | None:
        """The peer whose word the training thread, or the ballot that is held, waits for; None: no wait."""
        core, machine = self.core, self.machine
        if core.out:
            self.let_go()
        if core.proposal is not None or core.inquest is not None:
            return None
        if core.holding is not None:
            return machine.succession.expected or machine.member.authority()
        if core.own.boundary and core.here.joining is None and not core.out:
            return core.leader()
        return None

    def watch(self) -> None:
        """Called after every event: a wait has a deadline."""
        core = self.core
        awaited = self.awaited()
        if awaited is None and self.machine.core.holding is not None and Timer.INQUIRE not in core.timers:
            self.machine.succession.start()  # the peer that was to decide the ballot is gone
            awaited = self.awaited()
        self._bound_lead(awaited)
        if awaited is None or awaited == core.me:
            if Timer.WORD in core.timers:
                core.disarm(Timer.WORD)
        elif Timer.WORD not in core.timers:
            core.arm(Timer.WORD, core.now + core.deadlines.word(awaited))

    def _bound_lead(self, leader: PeerId | None) -> None:
        """Arm the timer that ends a wait for a leader that says that it is at work, and gets nothing done."""
        core, held = self.core, self.core.holding
        wait = leader, None if held is None else held.ballot
        if wait != self._wait:
            self._wait, self._since = wait, core.now
        until = self._lead_ends(leader) if leader is not None and leader != core.me else None
        if leader is None or until is None:
            if Timer.VAIN in core.timers:
                core.disarm(Timer.VAIN)
            return
        until = max(until, self._deposed_at + core.deadlines.word(leader))
        if core.timers.get(Timer.VAIN) != until:
            core.arm(Timer.VAIN, until)

    def _lead_ends(self, leader: PeerId) -> float | None:
        """Until when this leader must have got this peer further; None: that is not up to the leader."""
        core, held = self.core, self.core.holding
        word = IDLE_WORDS * core.deadlines.word(leader)
        ended = core.own.boundary_at if held is None else held.proposed_at
        patience = 2 * core.deadlines.scale * core.deadlines.usual_epoch(ended - core.here.began_at)
        if held is None:
            waits = max(core.own.boundary_at, core.let_go_at) + self.machine.newcomers.allowance()
            return waits + word + min(patience, MOST_PATIENCE_S)
        if held.ballot.leader != leader:
            # A successor: it must ask all voters and decide. One that knows of no ballot does neither.
            answers = max(core.deadlines.answer(peer) for peer in held.voters)
            return self._since + word + answers
        if held.stage is Stage.DONE:
            return held.done_at + IDLE_TRANSFERS * (held.done_at - held.begun_at) + word
        return held.proposed_at + word + min(patience, MOST_PATIENCE_S) if not held.begun else None

    def on_vain_timer(self) -> None:
        """The leader says that it is at work, and nothing gets done."""
        awaited, self._deposed_at = self.awaited(), self.core.now
        if awaited is not None and awaited != self.core.me:
            self.depose(awaited)

    def failed(self, ballot: Ballot) -> None:
        """An attempt came to nothing: depose its leader when too many of that leader's attempts did."""
        if ballot.leader != self.core.me and self.core.failed(ballot) >= MOST_VAIN:
            self.depose(ballot.leader)

    def blames_most(self, blamed: Sequence[PeerId], members: int) -> bool:
        """Whether a leader blames most of its members: then the fault is rather the leader's own.

        members: of the ballot, whom this peer may no longer hear; 0: not known.
        """
        here = self.core.here
        others = max(members - 1, len(self.core.linked.standing(here.epoch, here.lineage)))
        return 2 * len(blamed) > others

    def depose(self, leader: PeerId) -> None:
        """Nothing gets done under this leader: have another leader."""
        self.core.trace(TraceKind.SUSPECTED, peer=leader, why="gets nothing done")
        self.core.depose(leader)
        self.machine.reporting.report_again()
        self.machine.succession.start()

    def heard(self, peer: PeerId) -> None:
        """The peer said something: if its word is awaited, the wait begins anew."""
        if Timer.WORD in self.core.timers and peer == self.awaited():
            self.core.disarm(Timer.WORD)

    def on_word_timer(self) -> None:
        awaited = self.awaited()
        if awaited is None or awaited == self.core.me:
            return
        self.core.trace(TraceKind.SUSPECTED, peer=awaited, why="says nothing")
        self.core.suspect(awaited)
        self.machine.reporting.report_again()
        self.machine.succession.start()
