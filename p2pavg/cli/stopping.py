"""Commands that run until somebody stops them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def until_stopped() -> Iterator[asyncio.Event]:
    """An event of the running loop that SIGINT and SIGTERM set. After the block they do what they do in any
    Python program; uvloop's own end would leave a handler that does nothing.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
