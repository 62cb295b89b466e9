"""Whose word this peer waits for, and what becomes of the wait: each has a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.rules.deadlines import Timer
from p2pavg.rounds.protocol.ballot import PeerId

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Waiting:
    """Waiting for a leader, or for whoever decides the ballot that this peer holds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core

    def awaited(self) -> PeerId | None:
        """Whose word the training thread or our ballot waits for; None: nobody's."""
        core, machine = self.core, self.machine
        if core.out and core.here.joining is None and core.leader() is None:
            machine.decisions.fail("nobody is left to average without this peer")
        if core.own.boundary and core.out and core.here.joining is None:
            core.resume()  # the epoch goes on without us
        if machine.core.proposal is not None or machine.core.inquest is not None:
            return None
        if machine.core.holding is not None:
            return machine.succession.expected or machine.member.authority()
        if core.own.boundary and not core.out and core.here.joining is None:
            return core.leader()
        return None

    def watch(self) -> None:
        """Called after every event: a wait has a deadline."""
        core = self.core
        awaited = self.awaited()
        if awaited is None and self.machine.core.holding is not None and Timer.INQUIRE not in core.timers:
            self.machine.succession.start()  # whoever was to decide our ballot is gone
            awaited = self.awaited()
        if awaited is None or awaited == core.me:
            core.disarm(Timer.WORD)
        elif Timer.WORD not in core.timers:
            core.arm(Timer.WORD, core.now + core.deadlines.word(awaited))

    def heard(self, peer: PeerId) -> None:
        """A word of the awaited peer."""
        if peer == self.awaited():
            self.core.disarm(Timer.WORD)

    def on_word_timer(self) -> None:
        awaited = self.awaited()
        if awaited is None or awaited == self.core.me:
            return
        self.core.trace(TraceKind.SUSPECTED, peer=awaited, why="says nothing")
        self.core.suspect(awaited)
        self.machine.counting.report_again()
        self.machine.succession.start()
