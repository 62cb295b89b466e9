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

_lock = threading.Lock()
_inside = 0
_before = 0.0  # what the interpreter had


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside, `sys.getswitchinterval()` is at most TURN_S, for the whole process; blocks may overlap, on any
    threads. What the user sets meanwhile stays.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            if _before > TURN_S:
                sys.setswitchinterval(TURN_S)


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0 and _before > TURN_S and abs(sys.getswitchinterval() - TURN_S) < 1e-6:
            sys.setswitchinterval(_before)
