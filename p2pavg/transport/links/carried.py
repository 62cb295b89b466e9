"""What a peer's connections carry over the network, by whom they lead to, from their first packet on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from p2pavg.report.wire import Wire
from p2pavg.transport import tcp_info

MOST_PEERS = 4096  # that are told apart; what further ones were sent counts as nobody's


class Way(StrEnum):
    """How the connections of a link come about: one for all of them."""

    DIRECT = "direct"  # one side dialled the other's port
    PUNCHED = "punched"  # both dialled at once, through the NATs in front of them
    RELAYED = "relayed"  # a third member passes on what both say, and can read none of it


class CountedSocket(socket.socket):
    """A TCP socket that is counted until it closes, or is handed to an engine, which counts its own."""

    peer: bytes | None = None  # None: who it is has not been proved
    way: Way = Way.DIRECT
    carried: Carried | None = None

    def hand_over(self) -> None:
        """Whoever takes it counts it from its beginning."""
        if self.carried is not None:
            self.carried.sockets.pop(self, None)
            self.carried = None

    def close(self) -> None:
        if self.carried is not None and self.fileno() >= 0:
            self.carried.add(self.peer, tcp_info.wire(self) or Wire())
            self.hand_over()
        super().close()


class Carried:
    """On the loop thread."""

    def __init__(self) -> None:
        self.sockets: dict[CountedSocket, None] = {}  # that are open
        self._closed: dict[bytes | None, Wire] = {}

    def socket(self, *args: Any, **options: Any) -> CountedSocket:
        """A new one; arguments as of socket.socket."""
        sock = CountedSocket(*args, **options)
        sock.carried = self
        self.sockets[sock] = None
        return sock

    def add(self, peer: bytes | None, wire: Wire) -> None:
        """What is closed carried so much."""
        if peer not in self._closed and len(self._closed) >= MOST_PEERS:
            peer = None
        self._closed[peer] = self._closed.get(peer, Wire()) + wire

    def by_peer(self) -> Mapping[bytes | None, Wire]:
        """Since this peer began; what engines drive is left out."""
        found = dict(self._closed)
        for sock in self.sockets:
            found[sock.peer] = found.get(sock.peer, Wire()) + (tcp_info.wire(sock) or Wire())
        return found
