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

from p2pavg.optim.process.sigterm import SLACK_S
from p2pavg.peer.words.notice import tell


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
        self._handler: Any = None  # that was there before
        self._holds = False
        self._owner = 0  # the process that holds them
        self._came: threading.Event | None = None  # a Ctrl-C that waits; set when it is over
        self._told = False  # the program was told of one, and no step has begun since
        self._began: Callable[[], bool] = lambda: False
        self._notice_s = 0.0

    @property
    def waits(self) -> bool:
        """Whether a Ctrl-C came that the program was not told of yet."""
        return self._came is not None or (self._outer is not None and self._outer.waits)

    @property
    def _outer(self) -> Interrupts | None:
        """That of the block around this one."""
        outer = getattr(self._handler, "__self__", None)
        return outer if isinstance(outer, Interrupts) else None

    @property
    def _beneath(self) -> Any:
        """The handler that is to be there without this one: not that of a block that has ended."""
        outer = self._outer
        return self._handler if outer is None or outer._holds else outer._beneath

    def hold(self, began: Callable[[], bool], notice_s: float) -> None:
        """Hold interrupts back from now on.

        began: whether training has begun; before it there is nothing to lose. notice_s: how long, at most.
        """
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if not self._holds and handler != self._on_signal:
            self._handler, self._owner, self._began, self._notice_s = handler, os.getpid(), began, notice_s
            self._holds, self._told = True, False
            signal.signal(signal.SIGINT, self._on_signal)

    def begins(self) -> None:
        """A step begins."""
        self.inside, self._told = True, False

    def ended(self) -> None:
        """A step has ended."""
        self.inside = False
        if self._came is None or self._came.is_set():
            return
        self._came.set()
        if threading.current_thread() is threading.main_thread():
            self._deliver()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def release(self) -> None:
        """Hold nothing back any more; what came is delivered. Only the main thread may."""
        if not self._holds or threading.current_thread() is not threading.main_thread():
            return
        self._holds = False
        if signal.getsignal(signal.SIGINT) == self._on_signal:  # else somebody replaced it
            signal.signal(signal.SIGINT, self._beneath)
        if self._came is not None:
            self._deliver()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner and get_worker_info() is not None:
            return  # a loader's process works on until its parent ends it
        if self.waits or self._told:
            self._deliver(at_once=True)
        elif not self._holds or os.getpid() != self._owner or not self._began():
            self._handler(number, frame)
        else:
            self._came = threading.Event()
            threading.Thread(target=self._wait, args=(self._came,), daemon=True).start()

    def _wait(self, over: threading.Event) -> None:
        """Said on a thread of its own: a handler may interrupt another print."""
        tell("Ctrl-C: this peer leaves at the end of its step(); press it again to leave at once")
        if not over.wait(self._notice_s + SLACK_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _deliver(self, *, at_once: bool = False) -> None:
        """at_once: past the blocks around this one, too, which would wait for their own steps."""
        came, self._came, self._told = self._came, None, True
        if came is not None:
            came.set()
        if at_once and self._outer is not None:
            self._outer._deliver(at_once=True)
        else:
            self._handler(signal.SIGINT, None)
