"""Boundary: the training thread at its step boundary, where it hands in sums and takes what the rounds have
for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session


class Boundary:
    """Tells the machine where the training thread is, and lets the thread go on. Runs on the loop thread."""

    def __init__(
        self,
        session: Session,
        deliveries: Deliveries,
        machine: Machine,
        recorder: Recorder,
        gauges: Gauges,
        feed: Callable[[ev.Event], None],
        held: Callable[[], bool],
    ) -> None:
        """held: whether the thread must stay at the boundary, as it leaves the run there."""
        self._session = session
        self._deliveries = deliveries
        self._machine = machine
        self._recorder = recorder
        self._gauges = gauges
        self._feed = feed
        self._held = held

    def local(self, *, at_boundary: bool) -> ev.LocalProgress:
        """The training thread's progress, for the machine. at_boundary: it waits, with a contribution."""
        session = self._session
        contribution = self._deliveries.contribution if at_boundary else None
        return ev.LocalProgress(
            samples=contribution.samples if contribution is not None else session.samples(),
            samples_per_second=self._recorder.rate(session.samples(), session.steps),
            at_boundary=at_boundary,
            weight=contribution.weight if contribution is not None else None,
            note=contribution.note if contribution is not None else b"",
            step_seconds=session.step_seconds,
            step_samples=session.step_samples,
            upload_bps=self._gauges.upload_bps,
            download_bps=self._gauges.download_bps,
        )

    def tell(self) -> None:
        """Feed the progress of the training thread to the machine."""
        self._feed(self.local(at_boundary=self._deliveries.waiting))

    def deliver(self) -> None:
        """Give the waiting thread what is next, and call a computing one to its boundary."""
        self.give_next()
        self._deliveries.refresh_attention()

    def give_next(self) -> bool:
        """Give the waiting thread what is next; whether there was anything."""
        given = self._deliveries.give()
        if given:
            self._deliveries.refresh_attention()
        return given

    def resume(self) -> None:
        """Let the thread compute on after a round, unless it waits for the state or has come to leave."""
        what = self._deliveries.contribution
        if what is not None and what.samples == 0 and self._machine.role is Role.JOINER:
            return  # it has nothing to lose, and nothing to go on from: it waits for the state
        if not self._held():
            self.release()

    def release(self) -> None:
        """Let the thread compute on, if it waits."""
        if self._deliveries.resume():
            self._recorder.resumed(time.monotonic())
            self._feed(self.local(at_boundary=False))
