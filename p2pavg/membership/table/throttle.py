"""How much of this peer's time one sender may have."""

from __future__ import annotations

from collections import OrderedDict

MAX_SENDERS = 4096


class Throttle:
    """A token bucket for each sender: `rate` units of work a second, `burst` at once."""

    def __init__(self, *, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str | bytes, tuple[float, float]] = OrderedDict()

    def admits(self, sender: str | bytes, now: float, work: float = 1.0) -> bool:
        """Whether to do so much more for `sender`; what is refused costs it nothing."""
        tokens = self._left(sender, now)
        admitted = tokens >= work
        self._keep(sender, tokens - work if admitted else tokens, now)
        return admitted

    def owes(self, sender: str | bytes, now: float, work: float) -> float:
        """After so much more was done for `sender`: the seconds until all of it is within its rate."""
        tokens = self._left(sender, now) - work
        self._keep(sender, tokens, now)
        return max(0.0, -tokens / self._rate)

    def _left(self, sender: str | bytes, now: float) -> float:
        tokens, since = self._buckets.get(sender, (self._burst, now))
        return min(self._burst, tokens + (now - since) * self._rate)

    def _keep(self, sender: str | bytes, tokens: float, now: float) -> None:
        self._buckets[sender] = (tokens, now)
        self._buckets.move_to_end(sender)
        if len(self._buckets) > MAX_SENDERS:
            self._buckets.popitem(last=False)
