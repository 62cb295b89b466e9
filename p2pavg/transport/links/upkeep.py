"""The periodic work on an endpoint's links: pings each second; repairs and stream counts while jobs run."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from p2pavg.transport.engine import Engine
from p2pavg.transport.links.repair import Repairs
from p2pavg.transport.links.streams.tuner import StreamCounts

logger = logging.getLogger("p2pavg.transport")

PING_INTERVAL_S = 1.0
_WATCH_INTERVAL_S = 0.1  # seconds between two checks while jobs run
_REMEMBER_S = 30.0  # seconds between two saves of the measurements, as a process may be killed


async def keep_up(
    engine: Engine,
    ping_all: Callable[[], None],
    repairs: Repairs,
    counts: StreamCounts | None,
    remember: Callable[[], None],
) -> None:
    """Ping, repair and tune until cancelled. counts: None where the number of streams is fixed. remember:
    saves the measurements of paths.
    """
    pinged_at, remembered_at, running = -math.inf, time.monotonic(), False
    while True:
        now = time.monotonic()
        due = now - pinged_at >= PING_INTERVAL_S
        jobs = engine.running()
        try:
            if due:
                pinged_at = now
                ping_all()
            if due or jobs or running:
                repairs.tick(now, jobs)
                if counts is not None:
                    counts.tick(now, jobs)
            if now - remembered_at >= _REMEMBER_S and not jobs:
                remembered_at = now
                remember()
        except Exception:  # a fault in one link must not end the watch over the others
            logger.exception("watching the links failed")
        running = bool(jobs)
        await asyncio.sleep(min(_WATCH_INTERVAL_S, PING_INTERVAL_S))
