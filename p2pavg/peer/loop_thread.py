"""A background thread that runs one event loop for as long as its owner lives."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from p2pavg.errors import ClosedError, P2PAvgError

T = TypeVar("T")


class LoopThread:
    """An event loop (uvloop where it is installed) on a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, from any other thread. Raises ClosedError after `stop`."""
        if self.loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise ClosedError("this peer is closed; build a new one")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`submit` and wait. An interrupt cancels the work."""
        future = self.submit(work)
        try:
            return future.result()
        except P2PAvgError as error:
            error.__traceback__ = None  # a traceback into the loop would tell a user nothing
            raise error from None
        except BaseException:
            future.cancel()
            raise

    def cpu_seconds(self) -> float:
        """CPU time of the thread so far; 0.0 where the system does not tell."""
        ident = self._thread.ident
        if ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(ident))

    def stop(self) -> None:
        """Cancel what still runs, close the loop, end the thread. Idempotent; must not be called on the loop
        thread.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
