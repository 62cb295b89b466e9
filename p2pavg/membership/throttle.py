"""How much of this peer's time one sender may have."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

MAX_SENDERS = 4096


def network_of(host: str) -> str:
    """Whom a numeric address is counted to: an IPv4 address, or the /64 of an IPv6 one."""
    if ":" not in host:
        return host
    try:
        number = int(ipaddress.IPv6Address(host.partition("%")[0]))
    except ValueError:
        return host
    return f"{number >> 64:x}::"


class Throttle:
    """A token bucket for each sender: `rate` units of work a second, `burst` at once."""

    def __init__(self, *, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str | bytes, tuple[float, float]] = OrderedDict()

    def admits(self, sender: str | bytes, now: float, work: float = 1.0) -> bool:
        """Whether to do so much more for `sender`; what is refused costs it nothing."""
        tokens, since = self._buckets.get(sender, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        admitted = tokens >= work
        self._buckets[sender] = (tokens - work if admitted else tokens, now)
        self._buckets.move_to_end(sender)
        if len(self._buckets) > MAX_SENDERS:
            self._buckets.popitem(last=False)
        return admitted
