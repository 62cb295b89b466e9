"""The training thread of this peer, as the machine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.machine.actions import TraceKind
from p2pavg.rounds.machine.events import Applied, Discard, LocalProgress
from p2pavg.rounds.machine.rules.pace import Pace
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Trainer:
    """Takes what the training thread tells: how much it has counted, whether it waits, what it has
    applied.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core

    def on_progress(self, event: LocalProgress) -> None:
        """The training thread told how far it is."""
        core, own = self.core, self.core.own
        own.measured(event)
        if core.here.pending:
            own.end_wait()  # the samples that it tells are those before the average, which comes next
            return
        if event.samples > own.samples:
            own.step(Pace(event.step_seconds, event.step_samples, core.now))
            core.deadlines.measured_step(core.me, event.step_seconds)
        same = own.declares(event)
        if not event.at_boundary:
            own.end_wait()
            return
        own.forget_stop()
        core.epoch_state.expect(0)  # the leader says how far the others are
        if not same:
            own.begin_wait(core.now)
        self.machine.member.at_boundary()
        if not same:
            self.let_idle_go()

    def let_idle_go(self) -> None:
        """Let a training thread that came with nothing go on, if no round counts on it and this peer
        has a state.
        """
        core = self.core
        idle = core.own.boundary and not core.own.samples and not self.machine.member.declared
        if idle and self.machine.role is Role.TRAINER:
            core.resume()

    def on_applied(self, event: Applied) -> None:
        """The training thread stands where the last average brought this peer."""
        core = self.core
        if not core.here.applied(event.epoch):
            return
        core.trust(core.me)  # this peer abdicated because it was late, and is late no more
        core.own.begin_step(core.now)
        core.deadlines.measured_apply(core.me, core.now - core.here.began_at)
        core.trace(TraceKind.APPLIED)
        if core.here.joining is None:
            core.wait_at(self.machine.counting.expected(0))

    def on_discard(self, event: Discard) -> None:
        """The training thread dropped what it had."""
        self.core.own.drop()
        self.core.own.offered.clear()
