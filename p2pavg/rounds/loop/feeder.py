"""Feeder: gives events to the rounds machine one by one, and wakes it at its deadlines. On the loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from p2pavg.rounds.machine.actions import Action
from p2pavg.rounds.machine.events import Event, Tick
from p2pavg.rounds.machine.machine import Machine


class Feeder:
    """The queue before one machine."""

    def __init__(
        self,
        machine: Machine,
        perform: Callable[[Action], None],
        broken: Callable[[Exception], None],
    ) -> None:
        """perform: carries out one action; it may feed events, which follow those that wait. broken: is told
        what the machine or an action raised.
        """
        self._machine = machine
        self._perform = perform
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer fires
        self._closed = False

    def feed(self, event: Event) -> None:
        """Hand one event to the machine and carry out what it asks, in order, without recursion."""
        if self._closed:
            return
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events and not self._closed:
                for action in self._machine.handle(self._events.popleft(), time.monotonic()):
                    self._perform(action)
        except Exception as error:
            self._broken(error)
        finally:
            self._feeding = False
        self._schedule()

    def close(self) -> None:
        """Feed no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        """Deadlines change with almost every event, mostly to later ones: a timer that fires too early costs
        less than one that is made anew each time.
        """
        deadline = self._machine.next_deadline
        if deadline is None or self._closed or self._due <= deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
        left = max(0.0, deadline - time.monotonic())
        self._due = deadline
        # Timers count whole milliseconds, and one that is rounded down would be set again and again.
        self._timer = self._loop.call_later(math.ceil(1e3 * left) / 1e3, self._wake)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        deadline = self._machine.next_deadline
        if deadline is not None and time.monotonic() < deadline:
            self._schedule()
        else:
            self.feed(Tick())
