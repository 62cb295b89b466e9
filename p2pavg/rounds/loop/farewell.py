"""Farewell: the last boundary of a training thread that leaves, and its bequest. On the loop thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from p2pavg.rounds.loop.bequest import Bequests
from p2pavg.rounds.loop.deliveries import Deliveries
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.measure.beat import Pulse
from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Contribution, KeepGoing, Outcome

logger = logging.getLogger("p2pavg.rounds")


class Farewell:
    """What the driver does once its training thread leaves."""

    def __init__(
        self,
        session: Session,
        deliveries: Deliveries,
        bequests: Bequests,
        pulse: Pulse,
        feed: Callable[[ev.Event], None],
    ) -> None:
        self._session = session
        self._deliveries = deliveries
        self._bequests = bequests
        self._pulse = pulse
        self._feed = feed
        self._until: float | None = None  # time.monotonic() at which the notice ends
        self._action: act.Bequeath | None = None  # waits for the training thread
        self._giving: asyncio.Task[None] | None = None
        self.left = asyncio.Event()

    @property
    def until(self) -> float | None:
        """time.monotonic() at which the notice ends; None: nobody leaves."""
        return self._until

    @property
    def waiting(self) -> bool:
        """The training thread must not be let go yet."""
        return self._until is not None and not self.left.is_set()

    def close(self) -> None:
        """Carry nothing any more."""
        if self._giving is not None:
            self._giving.cancel()

    def arrived(
        self,
        contribution: Contribution,
        notice_s: float,
        answer: Future[Outcome],
        local: Callable[[], ev.Event],
    ) -> None:
        """The training thread waits at its last boundary; local() tells the machine so."""
        if self.left.is_set():
            answer.set_result(KeepGoing())
            return
        self._deliveries.leaving = True
        self._deliveries.wait(contribution, answer)
        if self._deliveries.give() or self._deliveries.give_inheritance():
            self._deliveries.refresh_attention()
            return
        if self._until is None:
            self._until = time.monotonic() + notice_s
        self._feed(local())
        self._feed(ev.Leave(notice_s, hand_over=True))
        self._start()

    def bequeath(self, action: act.Bequeath) -> None:
        """The machine says to whom."""
        self._action = action
        self._start()

    def _start(self) -> None:
        what = self._deliveries.contribution
        if self._action is None or what is None or self._giving is not None or self._until is None:
            return
        work = self._give(self._action, what, self._until)
        self._giving = asyncio.get_running_loop().create_task(work)

    async def _give(self, action: act.Bequeath, what: Contribution, deadline: float) -> None:
        rate, left, nbytes = self._pulse.upload_bps, deadline - time.monotonic(), self._bequests.nbytes
        given = ev.Bequeathed(taken=False)
        if rate and 8 * nbytes > left * rate:
            logger.warning(
                "%.1f MB of accumulated gradients do not fit through %.1f Mb/s in the %.1f s of notice that "
                "are left: %d samples are lost",
                nbytes / 1e6,
                rate / 1e6,
                left,
                action.samples,
            )
        else:
            given = await self._bequests.give(
                action.heirs, what, self._session.standing, action.offered, deadline
            )
        self._feed(given)
