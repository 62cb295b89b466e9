"""TrainerDeparture: the last boundary of a training thread that leaves, and its handover. On the loop
thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from p2pavg.printable import size
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.loop.handover import Handovers
from p2pavg.rounds.loop.state_transfer import States
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.measure.gauges import Gauges
from p2pavg.rounds.measure.recorder import Recorder
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.roles import Role
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Contribution, KeepGoing, Outcome
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.rounds")


class TrainerDeparture:
    """What the driver does once its training thread leaves."""

    def __init__(
        self,
        session: Session,
        deliveries: Deliveries,
        handovers: Handovers,
        states: States,
        machine: Machine,
        recorder: Recorder,
        gauges: Gauges,
        discarded: list[tuple[int, str]],
        feed: Callable[[ev.Event], None],
        release: Callable[[], None],
    ) -> None:
        """discarded: what the last report has to name, shared with the driver. release: lets the training
        thread go on.
        """
        self._session = session
        self._deliveries = deliveries
        self._handovers = handovers
        self._states = states
        self._machine = machine
        self._recorder = recorder
        self._gauges = gauges
        self._discarded = discarded
        self._feed = feed
        self._release = release
        self._until: float | None = None  # time.monotonic() at which the notice ends
        self._action: act.HandOver | None = None  # waits for the training thread
        self._giving: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None  # whoever downloads from us while we leave
        self._closed = False
        self.left = asyncio.Event()

    @property
    def waiting(self) -> bool:
        """The training thread must not be let go yet."""
        return self._until is not None and not self.left.is_set()

    def close(self) -> None:
        """Carry nothing any more."""
        self._closed = True
        for task in (self._giving, self._serving):
            if task is not None:
                task.cancel()

    def arrived(
        self,
        contribution: Contribution,
        notice_s: float,
        answer: Future[Outcome],
        tell: Callable[[], None],
    ) -> None:
        """The training thread waits at its last boundary; tell() says so to the machine."""
        if self.left.is_set():
            answer.set_result(KeepGoing())
            return
        self._deliveries.departing = True
        self._deliveries.wait(contribution, answer)
        if self._deliveries.give() or self._deliveries.give_inheritance():
            self._deliveries.refresh_attention()
            return
        if self._until is None:
            self._until = time.monotonic() + notice_s
        tell()
        self._feed(ev.Leave(notice_s, hand_over=True))
        self._start()

    def hand_over(self, action: act.HandOver) -> None:
        """The machine says to whom."""
        self._action = action
        self._start()

    def _start(self) -> None:
        what = self._deliveries.contribution
        if self._action is None or what is None or self._giving is not None or self._until is None:
            return
        work = self._give(self._action, what, self._until)
        self._giving = asyncio.get_running_loop().create_task(work)

    async def _give(self, action: act.HandOver, what: Contribution, deadline: float) -> None:
        rate, left, nbytes = self._gauges.upload_bps, deadline - time.monotonic(), self._handovers.nbytes
        given = ev.HandedOver(taken=False)
        if rate and 8 * nbytes > left * rate:
            logger.warning(
                "%s of accumulated gradients do not fit through %.1f Mb/s in the %.1f s of notice that "
                "are left: %d samples are lost",
                size(nbytes),
                rate / 1e6,
                left,
                action.samples,
            )
        else:
            given = await self._handovers.give(
                action.receivers, what, self._session.standing, action.offered, deadline
            )
        self._feed(given)

    def leave(self, links: Mapping[bytes, Link]) -> None:
        """The rounds are over for this peer. Whoever downloads a state that nobody else has gets it first,
        within the notice.
        """
        if self._until is None or not self._states.last_holder:
            self._has_left(links)
            return
        logger.info("a newcomer downloads the state, which nobody else has: it gets it before this peer goes")
        serving = asyncio.get_running_loop().create_task(self._states.served(self._until))
        serving.add_done_callback(lambda _: None if self._closed else self._has_left(links))
        self._serving = serving

    def _has_left(self, links: Mapping[bytes, Link]) -> None:
        """Name what is lost, and let the training thread go."""
        inherited = self._deliveries.drop_inheritances()
        if inherited:
            behind = self._machine.role is Role.JOINER
            self._discarded.append((inherited, Loss.LEFT_BEHIND if behind else Loss.LEFT))
        if self._discarded:
            lost = tuple(self._discarded)
            self._session.left(self._recorder.left(self._machine.epoch, self._machine.lineage, lost, links))
            self._discarded.clear()
        self.left.set()
        self._release()
