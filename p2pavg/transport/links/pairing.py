"""The choice between two connections of the same two peers, who may both have dialled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from p2pavg.transport.links import handshake
from p2pavg.transport.links.carried import Way
from p2pavg.transport.links.handshake import Hello
from p2pavg.transport.links.link import Link

_QUIET_S = 1.5  # seconds without a byte after which a link counts as silent; pings come each second
_ALIVE_S = 3.0  # seconds for an old link to prove that it lives, before a new one replaces it


class Pairing:
    """When two peers dial each other at once, the one with the smaller id decides which connection they keep:
    as dialler it does not go on when it has a link, and as listener it refuses.
    """

    def __init__(self, peer_id: bytes, links: Mapping[bytes, Link]) -> None:
        """peer_id: this peer's. links: by peer, a live view."""
        self._peer_id = peer_id
        self._links = links
        self._proving: set[bytes] = set()  # peers to which a dial of this side has sent its proof
        self._arrivals: dict[bytes, asyncio.Future[Link]] = {}  # dials that wait for the other side's dial

    async def as_dialler(self, theirs: Hello, *, anew: bool = False, way: Way = Way.DIRECT) -> None:
        """Raises Refusal when the other side's connection is kept. The caller calls `proved` afterwards.

        anew: the existing link was silent when the dial began; if it still is, the new connection replaces
        it. way: how the new connection was made; a connection without a relay replaces a relayed one.
        """
        existing = await self._settled(theirs)
        if existing is not None and anew and existing.quiet_s > _QUIET_S:
            existing.close("it was silent, and a new connection is not")
        elif existing is not None and existing.way is Way.RELAYED and way is not Way.RELAYED:
            existing.close("a connection that nobody relays takes its place")
        elif existing is not None:
            raise handshake.SUPERSEDED
        self._proving.add(theirs.peer_id)

    def proved(self, peer_id: bytes) -> None:
        """Note that the dial which `as_dialler` let on is over."""
        self._proving.discard(peer_id)

    async def as_listener(self, theirs: Hello, accepted_at: float) -> None:
        """Raises Refusal when another connection to the same peer is kept."""
        decides = self._peer_id < theirs.peer_id
        existing = await self._settled(theirs)
        if existing is None:
            if decides and theirs.peer_id in self._proving:
                raise handshake.SUPERSEDED
        elif decides and accepted_at < existing.established_at:
            raise handshake.SUPERSEDED
        else:  # the other side has lost its end of the old link, or has decided for the new one
            existing.close("replaced by a newer connection")

    async def _settled(self, theirs: Hello) -> Link | None:
        """The existing link. Of two processes with one identity, the new one takes over from a dead one."""
        existing = self._links.get(theirs.peer_id)
        if existing is None or existing.hello["incarnation"] == theirs.incarnation:
            return existing
        if await existing.alive(_ALIVE_S):
            raise handshake.SecondUse(theirs.peer_id, existing.hello["incarnation"])
        existing.close("its process has restarted")
        return self._links.get(theirs.peer_id)

    async def arrival(self, peer_id: bytes) -> Link:
        """Wait for the link that the other side's dial makes."""
        if peer_id in self._links:
            return self._links[peer_id]
        future = self._arrivals.get(peer_id)
        if future is None:
            future = self._arrivals[peer_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)

    def arrived(self, link: Link) -> None:
        """Hand a link that is up to the dials that wait for it."""
        waiting = self._arrivals.pop(link.peer_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(link)
