"""Numeric addresses of the host names that peers announce: off the loop, a few at a time, and soon forgotten.

Anybody may announce any name, of any domain: looking one up may take half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from p2pavg.membership.table.address import (
    can_be_of_peer,
    families_in_turn,
    family_of,
    is_link_local,
    is_loopback,
    is_numeric,
    normalise,
)

MAX_NAMES = 256
MAX_ADDRESSES = 4  # of one name
MAX_LOOKUPS = 4  # at once, each in a thread of its own
KEEP_SECONDS = 300.0
KEEP_FAILED_SECONDS = 30.0
AGAIN_SECONDS = 5.0  # between two look-ups of a name at whose address nobody answers


class Names:
    """The recent answers of the system's resolver. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], found: Callable[[], None]) -> None:
        """found: called on the loop when a name has an address now."""
        self._clock = clock
        self._found = found
        self._known: OrderedDict[str, tuple[Sequence[str], float]] = OrderedDict()
        self._looking: set[str] = set()

    def numeric(self, host: str) -> Sequence[str]:
        """The addresses of a host, of both families in turn, as the system prefers them; none while it is
        looked up.
        """
        if is_numeric(host):
            return [host]
        known, until = self._known.get(host, ((), float("-inf")))
        if until <= self._clock() and host not in self._looking and len(self._looking) < MAX_LOOKUPS:
            self._looking.add(host)
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._look_up, args=(host, loop), daemon=True).start()
        return known

    def doubt(self, host: str) -> None:
        """Nobody answered where this name led: it may lead elsewhere by now, as after a change of address."""
        known, until = self._known.get(host, ((), float("inf")))
        if known and until - KEEP_SECONDS + AGAIN_SECONDS <= self._clock() < until:
            self._known[host] = known, self._clock()
            self.numeric(host)

    def _look_up(self, host: str, loop: asyncio.AbstractEventLoop) -> None:
        numeric: Sequence[str] = ()
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
            numeric = in_turn([normalise(sockaddr)[0] for *_, sockaddr in found])
        except (OSError, UnicodeError):
            pass  # no such name, or none that a resolver takes
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            loop.call_soon_threadsafe(self._keep, host, numeric)

    def _keep(self, host: str, numeric: Sequence[str]) -> None:
        self._looking.discard(host)
        until = self._clock() + (KEEP_SECONDS if numeric else KEEP_FAILED_SECONDS)
        self._known[host] = numeric, until
        self._known.move_to_end(host)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)
        if numeric:
            self._found()


def in_turn(hosts: Sequence[str]) -> list[str]:
    """The first addresses of a name, of one family and the other in turn: either family may lead nowhere. One
    that holds on a link alone is left out, and so is loopback, unless the name is this machine's own.
    """
    told = [host for host in dict.fromkeys(hosts) if can_be_of_peer(host) and not is_link_local(host)]
    usable = [host for host in told if not is_loopback(host)] or told
    return families_in_turn(usable, family_of)[:MAX_ADDRESSES]
