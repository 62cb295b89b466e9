"""SIGTERM: optimizers leave their runs at the next step(), or in the one that waits for others, within their
notice; then the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any, Protocol

from p2pavg.peer import sigterm as peers
from p2pavg.peer.sigterm import EXIT_CODE

SLACK_S = 2.0  # seconds after the notice until a training thread that calls no step() is interrupted


class Watched(Protocol):
    """An optimizer that leaves its run when asked."""

    @property
    def began(self) -> bool:
        """Whether it has trained."""
        ...

    def close(self, notice_s: float | None = None) -> None: ...

    def call_off(self) -> None:
        """Have `step()` wait for others no longer than for a round that counts on it. Any thread."""
        ...


_watched: weakref.WeakKeyDictionary[Watched, float] = weakref.WeakKeyDictionary()
_owner = 0  # the process that installed the handler
_before: Any = signal.SIG_DFL  # the handler that it replaced: none, or that of the optimizers' peers
_asked_at: float | None = None
_timer: threading.Timer | None = None


def watch(optimizer: Watched, notice_s: float) -> None:
    """Let the optimizer leave on SIGTERM. Does nothing on other threads than the main one, or where the
    signal has another handler.
    """
    global _owner, _asked_at, _before
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler not in (signal.SIG_DFL, peers.on_signal, _on_signal):
        return
    if handler is not _on_signal:
        _before = handler
    _watched[optimizer] = notice_s
    _owner, _asked_at = os.getpid(), None
    signal.signal(signal.SIGTERM, _on_signal)


def forget(optimizer: Watched) -> None:
    """Forget an optimizer that has left. After the last one, SIGTERM does what it did before."""
    known = _watched.pop(optimizer, None)
    if known is not None and not _watched and signal.getsignal(signal.SIGTERM) is _on_signal:
        with contextlib.suppress(ValueError):  # only the main thread may; else the handler does it itself
            signal.signal(signal.SIGTERM, _before)


def leaves() -> bool:
    """Whether SIGTERM lets an optimizer leave."""
    return bool(_watched) and signal.getsignal(signal.SIGTERM) is _on_signal


def asked() -> bool:
    """Whether SIGTERM came, so that `obey` is to be called at the next boundary."""
    return _asked_at is not None


def obey() -> None:
    """Let all optimizers leave, and end the process with code 143, by SystemExit in the main thread."""
    assert _asked_at is not None
    if _timer is not None:
        _timer.cancel()
    for optimizer, notice_s in list(_watched.items()):
        optimizer.close(max(0.0, _asked_at + notice_s - time.monotonic()))
    if threading.current_thread() is not threading.main_thread():
        _interrupt()
    raise SystemExit(EXIT_CODE)


def _interrupt() -> None:
    """Raise SystemExit in the main thread, whatever it does or waits for."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _call_off() -> None:
    """On a thread of its own: the main thread may hold the very locks that this needs."""
    for optimizer in list(_watched):
        optimizer.call_off()


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _asked_at, _timer
    if os.getpid() != _owner or (not _watched and _asked_at is None):  # a forked child, or all left
        signal.signal(signal.SIGTERM, _before)
        signal.raise_signal(signal.SIGTERM)
        return
    if _asked_at is not None:  # the notice is over, or somebody is in a hurry
        raise SystemExit(EXIT_CODE)
    if not any(
        optimizer.began for optimizer in _watched
    ):  # it may wait for others: there is nothing to hand over
        raise SystemExit(EXIT_CODE)
    _asked_at = time.monotonic()
    notice_s = max(_watched.values(), default=0.0)
    _timer = threading.Timer(notice_s + SLACK_S, _interrupt)
    _timer.daemon = True
    _timer.start()
    threading.Thread(target=_call_off, daemon=True).start()
