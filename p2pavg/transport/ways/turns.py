"""Turns: who of several flows may pass on bytes now, within one cap. Pure, time is a parameter."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from p2pavg.transport.limiter import Limiter

T = TypeVar("T")  # what stands for a flow

TURN_S = 0.01  # of the cap: a short word waits for one turn of each flow that has more to say
LEAST_TURN_BYTES, MOST_TURN_BYTES = 16 << 10, 256 << 10


class Turns(Generic[T]):
    """First come, first served; a turn is of at most `turn_bytes`."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._limiter: Limiter | None = None
        self._rate = 0.0
        self.turn_bytes = LEAST_TURN_BYTES

    def limit(self, bytes_per_second: float, now: float) -> None:
        """From now on."""
        if bytes_per_second != self._rate:
            self._rate = bytes_per_second
            self._limiter = Limiter(bytes_per_second, now)
            self.turn_bytes = max(LEAST_TURN_BYTES, min(int(bytes_per_second * TURN_S), MOST_TURN_BYTES))

    def ask(self, flow: T) -> None:
        """It has something to pass on."""
        self._waiting.append(flow)

    def leave(self, flow: T) -> None:
        """It has ended."""
        if flow in self._waiting:
            self._waiting.remove(flow)

    def next(self, now: float) -> T | None:
        """Whose turn it is; None: nobody's, now."""
        if not self._waiting or self.wait_s(now) > 0:
            return None
        return self._waiting.popleft()

    def wait_s(self, now: float) -> float:
        """Until the next turn; 0.0: now."""
        return 0.0 if self._limiter is None else self._limiter.wait_s(now)

    def spend(self, nbytes: int) -> None:
        """So much was passed on."""
        if self._limiter is not None:
            self._limiter.spend(nbytes)

    def __len__(self) -> int:
        return len(self._waiting)
