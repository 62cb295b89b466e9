"""SIGTERM: a process that has peers ends as a program does that calls `sys.exit`, so that they leave their
swarms, and give back what their gateways lead to them, instead of dying at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM

_peers: weakref.WeakSet[object] = weakref.WeakSet()
_owner = 0  # the process that installed the handler


def watch(peer: object) -> None:
    """Let the peer leave on SIGTERM: `SystemExit` is raised in the main thread, and who is not closed by a
    `finally` clause is at the interpreter's end. Does nothing on other threads than the main one, or where
    the signal has another handler.
    """
    global _owner
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, on_signal):
        return
    _peers.add(peer)
    _owner = os.getpid()
    signal.signal(signal.SIGTERM, on_signal)


def forget(peer: object) -> None:
    """Forget a peer that has left. After the last one, SIGTERM ends the process at once again."""
    _peers.discard(peer)
    if not _peers and signal.getsignal(signal.SIGTERM) is on_signal:
        with contextlib.suppress(ValueError):  # only the main thread may; else the handler does it itself
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def on_signal(number: int, frame: FrameType | None) -> None:
    """The handler."""
    if os.getpid() != _owner or not _peers:  # a forked child, or all left
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        return
    raise SystemExit(EXIT_CODE)
