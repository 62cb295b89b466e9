"""The training thread of this peer, as the machine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pavg.rounds.machine.events import Applied, Discard, LocalProgress
from p2pavg.rounds.machine.pace import Pace
from p2pavg.rounds.protocol.roles import Role

if TYPE_CHECKING:
    from p2pavg.rounds.machine.machine import Machine


class Trainer:
    """What it has counted, whether it waits, and which average it has applied."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.core = machine.core

    def on_progress(self, event: LocalProgress) -> None:
        """How far it is."""
        core = self.core
        core.upload_bps, core.download_bps = event.upload_bps, event.download_bps
        core.rate = event.samples_per_second
        if core.pending:
            core.wait = 0  # its samples are those before the average; it is given that next
            return
        if event.samples > core.samples:
            core.pace = Pace(event.step_seconds, event.step_samples, core.now)
            core.deadlines.measured_step(core.me, event.step_seconds)
        declared = event.samples, event.weight, event.note
        same = core.boundary and declared == (core.samples, core.weight, core.note)
        core.samples, core.weight, core.note = declared
        if not event.at_boundary:
            core.wait = 0
            return
        core.told_to_stop = False
        core.expected = 0  # it hears from the leader how far the others are
        if not same:
            core.begin_wait()
        self.machine.member.at_boundary()
        if not same:
            self.let_idle_go()

    def let_idle_go(self) -> None:
        """It came with nothing, and no round counts on it: it goes on, if it has a state to go on from."""
        core = self.core
        idle = core.boundary and not core.samples and not self.machine.member.declared
        if idle and self.machine.role is Role.TRAINER:
            core.resume()

    def on_applied(self, event: Applied) -> None:
        """It stands where the last average brought us."""
        core = self.core
        core.applied_epoch = event.epoch
        if not core.pending or event.epoch != core.epoch:
            return
        core.pending = False
        core.suspects.discard(core.me)  # it abdicated because it was late, and is no more
        core.pace.since = core.now
        core.deadlines.measured_apply(core.me, core.now - core.epoch_began_at)
        core.trace("applied")
        if core.joining is None:
            core.wait_at(self.machine.counting.expected(0))

    def on_discard(self, event: Discard) -> None:
        """It dropped what it had."""
        self.core.samples = 0
        self.core.offered.clear()
