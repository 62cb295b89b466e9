"""The limit of an upload, as a token bucket. Pure: time is a parameter."""

from __future__ import annotations

_BURST_S = 0.2  # seconds at the rate that a sender may catch up after a pause


class Limiter:
    """Lets a frame go as soon as there is any token, even into debt, so that the mean rate is exact."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self._rate = bytes_per_second
        self._tokens = 0.0
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until the next frame may start; 0.0: now."""
        self._tokens = min(self._tokens + (now - self._at) * self._rate, self._rate * _BURST_S)
        self._at = now
        return max(0.0, -self._tokens / self._rate)

    def spend(self, nbytes: int) -> None:
        self._tokens -= nbytes
