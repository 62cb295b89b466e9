"""How much of this node's time one sender may have."""

from __future__ import annotations

from collections import OrderedDict

RATE = 500.0
BURST = 1000.0
MAX_SOURCES = 4096


class Throttle:
    """A token bucket per source (IPv4 address, IPv6 /64): `rate` requests a second, `burst` at once."""

    def __init__(self, *, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admits(self, host: str, now: float) -> bool:
        """Whether to serve one more request from `host`."""
        source = ":".join(host.split(":")[:4]) if ":" in host else host
        tokens, since = self._buckets.get(source, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        admitted = tokens >= 1.0
        self._buckets[source] = (tokens - 1.0 if admitted else tokens, now)
        self._buckets.move_to_end(source)
        if len(self._buckets) > MAX_SOURCES:
            self._buckets.popitem(last=False)
        return admitted
