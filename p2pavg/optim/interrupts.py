"""Ctrl-C: it waits until parameters are whole again, and where it ends a `with` block, until a step ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from p2pavg.peer.words.notice import tell

SLACK_S = 2.0  # seconds after the notice until a training thread that calls no step() is interrupted


@contextmanager
def held_back() -> Iterator[None]:
    """Inside the block, the first Ctrl-C waits for the end; a second one interrupts at once.

    Only the main thread gets interrupts: on other threads, and where Python does not handle the signal, the
    block changes nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            handler(number, frame)
        came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])


class Interrupts:
    """Ctrl-C inside `with optimizer`: the first one waits for the end of a `step()`, where nothing of what
    was accumulated is half done, so that leaving can hand it over. A second one interrupts at once.

    What handled the signal before does so then, on the main thread; without a handler nothing changes.
    """

    def __init__(self) -> None:
        self.inside = False  # step() runs, or something came out of it
        self._handler: Any = None  # that was there before; None: interrupts are not held
        self._owner = 0  # the process that holds them
        self._came: threading.Event | None = None  # a Ctrl-C that waits; set when it is over
        self._began: Callable[[], bool] = lambda: False
        self._notice_s = 0.0

    @property
    def waits(self) -> bool:
        """Whether a Ctrl-C came that the program was not told of yet."""
        return self._came is not None

    def hold(self, began: Callable[[], bool], notice_s: float) -> None:
        """Hold interrupts back from now on.

        began: whether training has begun; before it there is nothing to lose. notice_s: how long, at most.
        """
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if self._handler is None:
            self._handler, self._owner, self._began, self._notice_s = handler, os.getpid(), began, notice_s
            signal.signal(signal.SIGINT, self._on_signal)

    def ended(self) -> None:
        """A step has ended."""
        self.inside = False
        if self._came is not None and threading.current_thread() is threading.main_thread():
            self._deliver()

    def release(self) -> None:
        """Hold nothing back any more; what came is delivered. Only the main thread may."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._on_signal:  # else somebody replaced it
            signal.signal(signal.SIGINT, self._handler)
        try:
            if self._came is not None:
                self._deliver()
        finally:
            self._handler = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner and get_worker_info() is not None:
            return  # a loader's process works on until its parent ends it
        if self._came is not None:
            self._deliver()
        elif os.getpid() != self._owner or not self._began():
            self._handler(number, frame)
        else:
            self._came = threading.Event()
            threading.Thread(target=self._wait, args=(self._came,), daemon=True).start()

    def _wait(self, over: threading.Event) -> None:
        """Said on a thread of its own: a handler may interrupt another print."""
        tell("Ctrl-C: this peer leaves at the end of its step(); press it again to leave at once")
        if not over.wait(self._notice_s + SLACK_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _deliver(self) -> None:
        assert self._came is not None
        self._came.set()
        self._came = None
        self._handler(signal.SIGINT, None)
