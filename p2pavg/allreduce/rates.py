"""What a peer or a link can move: its best rates of late, in windows while gradients flow. Pure, with `now`
as a parameter.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 0.25
ROUNDS_KEPT = 16
LEAST_BYTES = 1 << 15  # a window that moved less tells nothing about what the network can do


class RateMeter:
    """One direction. The network is as fast as its fastest window; older rounds are forgotten."""

    def __init__(self) -> None:
        self._best: deque[float] = deque(maxlen=ROUNDS_KEPT)
        self._current = 0.0
        self._window: tuple[float, int] | None = None

    @property
    def bytes_per_second(self) -> float:
        """0.0: not known yet."""
        return max((*self._best, self._current), default=0.0)

    def observe(self, now: float, total_bytes: int, *, busy: bool = True, least_s: float = 0.0) -> None:
        """While a round transfers: all bytes that the network has taken, or brought, so far.

        busy: more wait to be moved; a window without is none. least_s: of a window: bytes come in bursts, one
        each round trip.
        """
        if self._window is None or not busy or total_bytes < self._window[1]:
            self._window = (now, total_bytes) if busy else None
            return
        start, before = self._window
        if now - start >= max(WINDOW_S, least_s):
            if total_bytes - before >= LEAST_BYTES:
                self._current = max(self._current, (total_bytes - before) / (now - start))
            self._window = (now, total_bytes)

    def round_over(self) -> None:
        """No round transfers any more."""
        if self._current > 0:
            self._best.append(self._current)
        self._current = 0.0
        self._window = None
