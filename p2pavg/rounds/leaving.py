"""Leaving the run on purpose: the last round's outcome first, then the samples go to somebody who stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.ballot import PeerId
from p2pavg.rounds.events import Bequeath, Bequeathed, Discarded, Event, Leave, Left, Role
from p2pavg.rounds.messages import Leaving

if TYPE_CHECKING:
    from p2pavg.rounds.machine import Machine

MOST_HEIRS = 4


class Departure:
    """Whether this peer leaves, and how far it is.

    It ends the round that it is in, as long as the notice allows. Then it tells everybody, so that nobody
    counts on it any more, and has what it accumulated carried to a peer of its lineage, which counts it as
    its own.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core
        self.announced = False
        self.left = False
        self._hand_over = False

    def on_leave(self, event: Leave) -> None:
        """From now on no new round."""
        core = self.core
        if not core.leaving:
            core.leaving = True
            self._hand_over = event.hand_over
            core.arm("leave", core.now + event.notice_s)

    def consider(self) -> None:
        """Called after every event: is the last round over?"""
        core = self.core
        if not core.leaving or self.announced:
            return
        undecided = self.machine.member.holding is not None or (self._hand_over and core.pending)
        if undecided and "leave" in core.timers:
            return
        self.machine.abandon_round("this peer leaves")
        self.announced = True
        deadline = core.timers.get("leave")
        core.timers.clear()
        for facts in core.view:
            core.send(facts.peer, Leaving(core.epoch))
        heirs = self._heirs()
        if self._hand_over and not undecided and deadline is not None and core.samples and heirs:
            core.arm("leave", deadline)
            core.act(Bequeath(heirs, core.samples))
        else:
            self._go()

    def on_announced(self, event: Event) -> None:
        """Nothing matters any more but the samples, and the end of the notice."""
        if isinstance(event, Bequeathed):
            if event.taken:
                self.core.trace("bequeathed", samples=self.core.samples)
                self.core.samples = 0
            self._go()
        elif "leave" not in self.core.timers:
            self._go()

    def _heirs(self) -> tuple[PeerId, ...]:
        """Who stands where we stand, the nearest first; then those who may have gone on from here."""
        core = self.core
        if core.role is not Role.TRAINER or core.joining is not None:
            return ()
        here = core.stands_here
        there = [facts for facts in core.view.trainers() if here(facts) or facts.epoch > core.epoch]
        there.sort(key=lambda f: (not here(f), f.pending, core.deadlines.rtt(f.peer), f.peer))
        return tuple(facts.peer for facts in there[:MOST_HEIRS])

    def _go(self) -> None:
        core = self.core
        if core.samples:
            behind = core.role is not Role.TRAINER or core.joining is not None
            core.act(Discarded(core.samples, "left, behind the others" if behind else "left"))
        core.timers.clear()
        self.left = True
        core.act(Left())
