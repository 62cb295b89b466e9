"""The machine is woken at its deadlines, and not before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from p2pavg.rounds.loop.feeder import Feeder
from p2pavg.rounds.machine.events import PeerDown, Tick


class Machine:
    """Waits for one moment, and keeps what it was given."""

    def __init__(self, deadline: float) -> None:
        self.next_deadline: float | None = deadline
        self.ticks: list[float] = []
        self.over = asyncio.Event()

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, Tick):
            self.ticks.append(now)
            if self.next_deadline is not None and now >= self.next_deadline:
                self.next_deadline = None
                self.over.set()
        return []


def test_a_deadline_between_two_milliseconds_is_one_tick() -> None:
    """uvloop's timers count whole milliseconds: what is left of a deadline does not become events."""

    async def run() -> None:
        for part in range(10):
            machine = Machine(time.monotonic() + 0.0103 + 1e-4 * part)
            feeder = Feeder(machine, lambda action: None, lambda error: None)  # type: ignore[arg-type]
            feeder.feed(PeerDown(b"", ""))
            deadline = machine.next_deadline
            assert deadline is not None
            await asyncio.wait_for(machine.over.wait(), 30)
            feeder.close()
            assert len(machine.ticks) == 1
            assert machine.ticks[0] >= deadline

    uvloop.run(run())
