"""The traffic of a peer's connections by the peer at their other end, counted from the first packet on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from p2pavg.report.wire import Wire
from p2pavg.transport import tcp_info

MOST_PEERS = 4096  # peers counted one by one; the traffic of further ones counts under None


class Way(StrEnum):
    """How the connections of a link are made; all of them in the same way."""

    DIRECT = "direct"  # one side dialled the other's port
    PUNCHED = "punched"  # both sides dialled at once, through the NATs in front of them
    RELAYED = "relayed"  # a third member passes on the bytes of both sides, and cannot read them


class CountedSocket(socket.socket):
    """A TCP socket that is counted until it closes, or is handed to an engine, which counts its own."""

    peer: bytes | None = None  # None: the other side has not proved its identity
    way: Way = Way.DIRECT
    owned = False  # by a control connection, which alone closes it: its transport may go on for a while
    carried: Carried | None = None
    _known = Wire()  # its traffic when it was last read
    _ends: tcp_info.Ends | None = None

    def wire(self) -> Wire:
        """Its traffic so far; once its descriptor is closed, as far as it is known."""
        self._ends = self._ends or tcp_info.ends(self)
        self._known = tcp_info.wire(self, self._ends) or self._known
        return self._known

    def hand_over(self) -> None:
        """Stop counting this socket: its next owner counts it from its beginning."""
        if self.carried is not None:
            self.carried.sockets.pop(self, None)
            self.carried = None

    def settle(self) -> None:
        """Count its traffic for good, as it carries nothing any more. uvloop closes a descriptor itself, and
        lets go of the socket after that.
        """
        if self.carried is not None:
            self.carried.add(self.peer, self.wire())
            self.hand_over()

    def detach(self) -> int:
        self.settle()
        return super().detach()

    def close(self) -> None:
        self.settle()
        super().close()


class Carried:
    """The traffic of open and closed connections, counted on the loop thread."""

    def __init__(self) -> None:
        self.sockets: dict[CountedSocket, None] = {}  # the open ones
        self._closed: dict[bytes | None, Wire] = {}

    def socket(self, *args: Any, **options: Any) -> CountedSocket:
        """Make a counted socket; the arguments are those of socket.socket."""
        sock = CountedSocket(*args, **options)
        sock.carried = self
        self.sockets[sock] = None
        return sock

    def add(self, peer: bytes | None, wire: Wire) -> None:
        """Add the traffic of a closed connection."""
        if peer not in self._closed and len(self._closed) >= MOST_PEERS:
            peer = None
        self._closed[peer] = self._closed.get(peer, Wire()) + wire

    def by_peer(self) -> Mapping[bytes | None, Wire]:
        """Traffic by peer id since this peer began, without the connections that engines drive."""
        found = dict(self._closed)
        for sock in self.sockets:
            found[sock.peer] = found.get(sock.peer, Wire()) + sock.wire()
        return found
