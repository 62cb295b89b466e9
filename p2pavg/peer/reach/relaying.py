"""Relaying: a member that volunteers carries what two others, without a way to each other, say."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from p2pavg.errors import P2PAvgError, ProtocolError, UnreachableError
from p2pavg.identity import short_id
from p2pavg.membership.table.throttle import Throttle
from p2pavg.peer.reach.errands import peer_in
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.handshake import Refusal
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways.relay import TOKEN_BYTES, Relay, enter

logger = logging.getLogger("p2pavg.peer.peer")

RELAY = "relay"  # asks a member for a tunnel to another one
TUNNEL = "tunnel"  # the relay tells the other one where its end of it is
ANSWER_S = 5.0
ENTER_S = 5.0
_TUNNELS_PER_S, _TUNNELS_AT_ONCE = 2.0, 64.0  # that one peer asks for


class No(StrEnum):
    """Why a relay refuses, and what to do, as people are told."""

    CLOSED = "it relays for nobody: start it with max_relay_mbps above 0"
    FULL = "it has as many tunnels as it keeps: let another member relay, too"
    BUSY = "it was asked too often: it is asked again later"
    UNLINKED = "it has no link to that peer any more: another member is asked"
    SILENT = "that peer did not answer it: it is asked again later"


class RelayDesk:
    """The relay's side. On the loop thread."""

    def __init__(
        self, endpoint: Endpoint, cap_bps: Callable[[], float], is_hidden: Callable[[], bool]
    ) -> None:
        """cap_bps: bit/s that this peer relays at most; 0.0: it relays for nobody."""
        self._endpoint = endpoint
        self._cap_bps = cap_bps
        self._is_hidden = is_hidden
        self.relay = Relay(endpoint.party, lambda: cap_bps() / 8)
        endpoint.reception.tunnels = self.relay.claim
        self._asked = Throttle(rate=_TUNNELS_PER_S, burst=_TUNNELS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> bool:
        """Whether this peer relays: who cannot be dialled cannot."""
        return not self._is_hidden() and self._cap_bps() > 0

    def close(self) -> None:
        """Relay for nobody any more."""
        for task in self._tasks:
            task.cancel()
        self.relay.close()

    def link_down(self, link: Link) -> None:
        """Only members with a link are relayed."""
        self.relay.forget(link.peer_id)

    def asked(self, link: Link, message: Message) -> None:
        """Somebody wants a tunnel to a peer. Raises ProtocolError."""
        peer = peer_in(message, "to")
        other = self._endpoint.links.get(peer)
        no = None
        if not self._asked.admits(link.peer_id, time.monotonic()):
            no = No.BUSY
        elif not self.open:
            no = No.CLOSED
        elif other is None or other is link or {Way.DIRECT} != {link.way, other.way}:
            no = No.UNLINKED
        elif not self.relay.make_room(link.peer_id, peer):
            no = No.FULL
        if no is not None or other is None:
            link.reply(message, {"t": RELAY, "no": (no or No.UNLINKED).name})
            return
        task = asyncio.get_running_loop().create_task(self._offer(link, message, other))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _offer(self, link: Link, message: Message, other: Link) -> None:
        own, theirs = self.relay.open(link.peer_id, other.peer_id)
        link.reply(message, {"t": RELAY, "token": own})
        try:
            await other.request({"t": TUNNEL, "from": link.peer_id, "token": theirs}, ANSWER_S)
        except (TimeoutError, UnreachableError):
            logger.debug("peer %s did not answer whom a tunnel leads to", short_id(other.peer_id))


class Tunnels:
    """The two ends' side. On the loop thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._asked = Throttle(rate=_TUNNELS_PER_S, burst=_TUNNELS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[tuple[bytes, str]] = set()

    def close(self) -> None:
        """Enter no tunnel any more."""
        for task in self._tasks:
            task.cancel()

    async def open(self, peer: bytes, relay: Link) -> CountedSocket:
        """A connection to the peer through the relay. Raises P2PAvgError, OSError, TimeoutError."""
        answer = await relay.request({"t": RELAY, "to": peer}, ANSWER_S)
        if "no" in answer:
            self._refused(peer, relay, answer["no"])
        return await self._enter(relay, answer.get("token"))

    def _refused(self, peer: bytes, relay: Link, code: object) -> None:
        no = No.__members__.get(code) if isinstance(code, str) else None
        why = (no or No.CLOSED).value
        who, whom = short_id(relay.peer_id), short_id(peer)
        if (relay.peer_id, why) not in self._told and no in (None, No.CLOSED, No.FULL):
            self._told.add((relay.peer_id, why))
            logger.warning("peer %s does not relay to peer %s: %s", who, whom, why)
        raise UnreachableError(f"peer {who} does not relay to peer {whom}: {why}")

    async def _enter(self, relay: Link, token: object) -> CountedSocket:
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise ProtocolError("a tunnel without a token")
        sock: CountedSocket | None = None
        try:
            async with asyncio.timeout(ENTER_S):
                sock = await wire.dial(*relay.address, self._endpoint.make_socket)
                wire.keep_alive(sock)
                await enter(sock, token, self._endpoint.party)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, Refusal):
                raise error.error() from None
            raise
        sock.way = Way.RELAYED
        return sock

    def asked(self, link: Link, message: Message) -> None:
        """A relay has a tunnel to us. Raises ProtocolError."""
        peer_in(message, "from")
        link.reply(message, {"t": TUNNEL})
        if self._asked.admits(link.peer_id, time.monotonic()):
            task = asyncio.get_running_loop().create_task(self._answer(link, message.get("token")))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, link: Link, token: object) -> None:
        try:
            sock = await self._enter(link, token)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("a tunnel at peer %s was not entered: %s", short_id(link.peer_id), error)
            return
        self._endpoint.welcome(sock)


class Ahead:
    """A tunnel for the first data stream that is asked for while the two ends of the link still greet, when a
    word takes long between them.
    """

    def __init__(self, opening: Coroutine[Any, Any, CountedSocket] | None) -> None:
        """opening: None: the two are near to each other."""
        self._task = None if opening is None else asyncio.get_running_loop().create_task(opening)

    async def take(self) -> CountedSocket | None:
        """The tunnel, once; None: there is none."""
        task, self._task = self._task, None
        if task is None:
            return None
        try:
            return await task
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("a tunnel that was asked for in advance did not come: %s", error)
            return None

    def close(self) -> None:
        """It is not needed."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            task.add_done_callback(_close_result)


def _close_result(task: asyncio.Task[CountedSocket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
