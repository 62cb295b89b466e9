"""Shorter turns of Python's threads while somebody waits for a round."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 0.0005
"""A thread that computes in Python keeps the interpreter for so long when another thread wants it. The event
loop wants it after every message, some thirty times a round; Python's own 5 ms would add a seventh of a
second.
"""

_SAME_S = 1e-6
_lock = threading.RLock()  # a signal handler may wait for a round, too
_inside = 0
_before = 0.0  # what the interpreter had


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside, `sys.getswitchinterval()` is at most TURN_S, for the whole process; blocks may overlap, on any
    threads. What the user sets meanwhile stays.
    """
    global _inside
    entered = False
    try:
        with _lock:
            _inside += 1
            entered = True
            _shorten()
        yield
    finally:
        if entered:
            with _lock:
                _inside -= 1
                if _inside == 0:
                    _restore()


def _shorten() -> None:
    global _before
    now = sys.getswitchinterval()
    if now > TURN_S + _SAME_S:  # else an interrupt may have kept a block from putting it back
        _before = now
        sys.setswitchinterval(TURN_S)


def _restore() -> None:
    if _before > TURN_S and abs(sys.getswitchinterval() - TURN_S) < _SAME_S:
        sys.setswitchinterval(_before)
