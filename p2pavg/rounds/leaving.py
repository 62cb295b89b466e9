"""Leaving the run on purpose: at once between rounds, after the outcome inside one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.events import Discarded, Leave, Left
from p2pavg.rounds.messages import Leaving

if TYPE_CHECKING:
    from p2pavg.rounds.machine import Machine

LEAVE_S = 5.0  # at most this long for the outcome of a running round


class Departure:
    """Whether this peer leaves, and how far it is."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.left = False

    def on_leave(self, event: Leave) -> None:
        """From now on no new round."""
        core = self.core
        if not core.leaving:
            core.leaving = True
            core.arm("leave", core.now + LEAVE_S)

    def consider(self) -> None:
        """Called after every event: is the last round over?"""
        core = self.core
        if not core.leaving or self.left:
            return
        if self.machine.member.holding is not None and "leave" in core.timers:
            return
        self.machine.abandon_round("this peer leaves")
        if core.samples:
            core.act(Discarded(core.samples, "left"))
        for facts in core.view:
            core.send(facts.peer, Leaving(core.epoch))
        core.timers.clear()
        self.left = True
        core.act(Left())
