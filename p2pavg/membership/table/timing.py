"""How long answers take: what is known about each address, and how long to wait for the next one."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque

from p2pavg.membership.table.address import Address
from p2pavg.membership.table.wire import NO_TOKEN

FIRST_TIMEOUT = 0.4
SHORTEST_TIMEOUT = 0.12
SHORTEST_PATIENCE = 0.04
LONGEST_TIMEOUT = 5.0
HURRY = 3.0  # times the slowest of those that have answered, and
HURRY_KNOWN = 1.25  # times its shortest round trip, where that is known
LATELY = 4.0  # times the median of the last answers
MAX_ENDPOINTS = 8192


class AddressFacts:
    """What is known about one address: its token for us and its round-trip time (RFC 6298 estimator,
    seconds).
    """

    __slots__ = ("deviation", "shortest", "smoothed", "token")

    def __init__(self) -> None:
        self.token = NO_TOKEN
        self.smoothed: float | None = None
        self.deviation = 0.0
        self.shortest = 0.0  # 0.0: not known

    def measured(self, rtt: float) -> None:
        self.shortest = min(rtt, self.shortest or rtt)
        if self.smoothed is None:
            self.smoothed, self.deviation = rtt, rtt / 2
        else:
            self.deviation += (abs(rtt - self.smoothed) - self.deviation) / 4
            self.smoothed += (rtt - self.smoothed) / 8


class Endpoints:
    """The addresses that this node asks, those least recently asked forgotten first."""

    def __init__(self) -> None:
        self._endpoints: OrderedDict[Address, AddressFacts] = OrderedDict()
        self._recent_rtts: deque[float] = deque(maxlen=32)

    def at(self, address: Address) -> AddressFacts:
        """What is known about an address, from now on too."""
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = AddressFacts()
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)
        else:
            self._endpoints.move_to_end(address)
        return endpoint

    def rtt(self, address: Address) -> float | None:
        """The smoothed round-trip time to an address in seconds, when known."""
        endpoint = self._endpoints.get(address)
        return endpoint.smoothed if endpoint else None

    def measured(self, endpoint: AddressFacts, rtt: float) -> None:
        """An answer took so many seconds."""
        endpoint.measured(rtt)
        self._recent_rtts.append(rtt)

    def _usual(self, endpoint: AddressFacts) -> float:
        if endpoint.smoothed is not None:
            usual = endpoint.smoothed + 4 * endpoint.deviation + 0.01
        elif len(self._recent_rtts) >= 4:
            usual = LATELY * statistics.median(self._recent_rtts)
        else:
            usual = FIRST_TIMEOUT / 2
        return min(max(usual, SHORTEST_PATIENCE), LONGEST_TIMEOUT / 2)

    def patience(self, endpoint: AddressFacts) -> float:
        """How long an answer from there usually takes at most, in seconds, as fast as answers come lately:
        what is known of an address may be of a time when this machine, or the network, was busy.
        """
        usual = self._usual(endpoint)
        if len(self._recent_rtts) < 4:
            return usual
        lately = LATELY * statistics.median(self._recent_rtts)
        return min(usual, max(lately, HURRY_KNOWN * endpoint.shortest + 0.01, SHORTEST_PATIENCE))

    def hurry(self, endpoint: AddressFacts, slowest_s: float) -> float:
        """The same, when others that were asked together with it took at most so long."""
        usual = max(HURRY * slowest_s + 0.01, HURRY_KNOWN * endpoint.shortest + 0.01)
        return min(max(usual, SHORTEST_PATIENCE), self.patience(endpoint))

    def timeout(self, endpoint: AddressFacts) -> float:
        """How long to wait for the answer to a first try, in seconds."""
        return min(max(2 * self._usual(endpoint), SHORTEST_TIMEOUT), LONGEST_TIMEOUT)
