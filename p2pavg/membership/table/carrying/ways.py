"""By which way each address is reached, UDP or TCP. Pure: decisions from what was answered, and when.

UDP comes first, since it costs least. An address that answered over TCP what it left unanswered over UDP is
asked over TCP from then on, and now and then over both, so that a way that opens is found. A node that had
such answers while nothing came over UDP is *deaf*. It asks over both ways at once, and beats over TCP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from p2pavg.membership.table.address import Address

MOST = 4096  # addresses
FRESH_SECONDS = 60.0  # for which an answer over UDP says that there is a way
FIRST_AGAIN_SECONDS, AGAIN_SECONDS = 2.0, 20.0  # till an address on TCP is asked over UDP as well
MISSES = 2  # questions that UDP left unanswered and TCP did not, till a node that UDP answered is deaf


class Carriers(NamedTuple):
    """Over which ways something goes."""

    udp: bool
    tcp: bool


UDP, TCP, BOTH = Carriers(True, False), Carriers(False, True), Carriers(True, True)


class Ways:
    """What one node knows of its ways to others. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._udp: OrderedDict[Address, float] = OrderedDict()  # when it last answered over UDP
        self._tcp: OrderedDict[Address, float] = OrderedDict()  # when it is asked over UDP again
        self._misses = 0  # since something came over UDP
        self._answered = False  # whether anything was ever answered over UDP

    @property
    def deaf(self) -> bool:
        """Whether UDP is of no use to this node, as far as it knows."""
        return self._misses >= (MISSES if self._answered else 1)

    @property
    def tcp_first(self) -> bool:
        """Whether TCP is the likelier of the two to get through: UDP has answered nothing yet, or no more."""
        return self.deaf or not self._answered

    def to_ask(self, address: Address, attempt: int) -> Carriers:
        """For the attempt of a question, 0 for the first one."""
        now = self._clock()
        again = self._tcp.get(address)
        if again is not None:
            if now < again:
                return TCP
            self._tcp[address] = now + AGAIN_SECONDS
            return BOTH
        if self.deaf or not (
            self._answered or self._misses
        ):  # it knows nothing yet: both, like happy eyeballs
            return BOTH
        fresh = now - self._udp.get(address, float("-inf")) <= FRESH_SECONDS
        return BOTH if attempt >= (2 if fresh else 1) else UDP

    def to_tell(self, address: Address) -> Carriers:
        """For what is not answered."""
        return TCP if self.deaf or address in self._tcp else UDP

    def by_udp(self, address: Address) -> None:
        """An answer came over UDP."""
        self._answered, self._misses = True, 0
        self._tcp.pop(address, None)
        self._udp[address] = self._clock()
        self._udp.move_to_end(address)
        if len(self._udp) > MOST:
            self._udp.popitem(last=False)

    def heard(self) -> None:
        """Something came over UDP, from whomever."""
        self._misses = 0

    def missed(self, address: Address) -> None:
        """An answer came over TCP, and none to the same question over UDP."""
        self._misses += 1
        self.tells_by_tcp(address)

    def tells_by_tcp(self, address: Address) -> None:
        """Whoever is there opens TCP connections to tell something, so UDP is of no use to it."""
        if address not in self._tcp:
            self._tcp[address] = self._clock() + FIRST_AGAIN_SECONDS
            if len(self._tcp) > MOST:
                self._tcp.popitem(last=False)

    def changed(self) -> None:
        """This machine's network may be another: what is on TCP is asked over UDP again now."""
        for address in self._tcp:
            self._tcp[address] = self._clock()
