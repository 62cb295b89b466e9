"""Incoming connections, on which the other side speaks first: links, data streams, and answers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from p2pavg.errors import P2PAvgError, ProtocolError
from p2pavg.membership.table.address import normalise
from p2pavg.membership.table.carrying.streams import HEAD_BYTES, Take, is_head
from p2pavg.transport.engine import Engine
from p2pavg.transport.links import greeting, handshake, observing
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.budget import Budget
from p2pavg.transport.links.carried import CountedSocket
from p2pavg.transport.links.handshake import Refusal
from p2pavg.transport.links.link import Link
from p2pavg.transport.links.link_maker import LinkMaker
from p2pavg.transport.links.streams.keeper import accept_stream

logger = logging.getLogger("p2pavg.transport")

Tunnels = Callable[[CountedSocket], Awaitable[None]]


class Reception:
    """Turns incoming connections into links and data streams, or answers them."""

    def __init__(
        self, maker: LinkMaker, budget: Budget, by_tag: Mapping[bytes, Link], engine: Engine
    ) -> None:
        self._maker = maker
        self._budget = budget
        self._by_tag = by_tag
        self._engine = engine
        self.table: Take | None = None  # takes connections of the table, which share the port
        self.observed: set[tuple[str, int]] = (
            set()
        )  # who was told how its connection is seen here, and keeps it
        self.tunnels: Tunnels | None = None  # takes connections for a relay to join; None: no relay here

    async def welcome(self, sock: CountedSocket) -> None:
        """Serve one connection until it is a link, a data stream, answered or refused. Never raises."""
        accepted_at, maker = time.monotonic(), self._maker
        try:
            async with asyncio.timeout(wire.HANDSHAKE_S):
                raw = await self._first_bytes(sock)
                if self.table is not None and is_head(raw):
                    await self.table(sock, raw)
                    return
                kind = await self._kind(sock, raw)
                if kind == handshake.DATA:
                    await accept_stream(sock, self._by_tag, self._engine, maker.party, self._admits_stream)
                    return
                address = self._address(sock)
                if kind != handshake.CONTROL:
                    await self._answer(sock, kind)
                    return
                mine, way = maker.make_hello(), sock.way
                met = await greeting.as_listener(
                    sock,
                    maker.identity,
                    mine,
                    lambda theirs: maker.check(mine, theirs),
                    lambda theirs: maker.pairing.as_listener(theirs, accepted_at),
                    maker.tls(way),
                )
            sock.peer = met.dialler.peer_id
            maker.establish(met, (address, met.dialler.port), dialled=False, way=way)
        except Refusal as refusal:
            logger.debug("refused a connection: %s", refusal.text)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("a connection ended before its handshake: %s", error)

    async def _answer(self, sock: CountedSocket, kind: int) -> None:
        try:
            if kind == handshake.OBSERVE:
                at = normalise(sock.getpeername())
                self.observed.add(at)
                try:
                    await observing.tell(sock, at, self._maker.party)
                finally:
                    self.observed.discard(at)
            elif self.tunnels is not None:
                await self.tunnels(sock)
                return
        except BaseException:
            sock.close()
            raise
        sock.close()

    def _address(self, sock: socket.socket) -> str:
        """The other side's address. Closes the socket and raises ProtocolError after too many handshakes."""
        address, _ = normalise(sock.getpeername())
        if not self._budget.admits_handshake(address, time.monotonic()):
            sock.close()
            raise ProtocolError("too many handshakes from one address")
        return address

    def _admits_stream(self, link: Link) -> bool:
        return self._budget.admits_stream(link.peer_id, time.monotonic())

    async def _first_bytes(self, sock: socket.socket) -> bytes:
        """A node of the table sends fewer than a peer, and may wait for an answer then."""
        try:
            raw = await wire.receive(sock, HEAD_BYTES)
            if is_head(raw):
                return raw
            return raw + await wire.receive(sock, handshake.PREAMBLE_BYTES - HEAD_BYTES)
        except BaseException:
            sock.close()
            raise

    async def _kind(self, sock: socket.socket, raw: bytes) -> int:
        try:
            return handshake.parse_preamble(raw, self._maker.party)
        except Refusal as refusal:
            answer = handshake.preamble(handshake.CONTROL, self._maker.party)
            await wire.send(sock, answer + handshake.pack(refusal.message()))
            sock.close()
            raise
        except BaseException:
            sock.close()
            raise
