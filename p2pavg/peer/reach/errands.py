"""Errands: what a member does for two others that have no link to each other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.identity import PEER_ID_BYTES, short_id
from p2pavg.membership.table.throttle import Throttle
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways import punching

logger = logging.getLogger("p2pavg.peer.peer")

KNOWS = "knows"  # asks a peer whether it has a link to another
PUNCH = "punch"  # a side of a meeting tells the other where it can be dialled
PASS_S = 6.0  # how long the one that is asked to meet may take to answer
_PUNCHES_PER_S, _PUNCHES_AT_ONCE = 20.0, 400.0  # of one peer: each has the other side send a dozen packets


class Desk(Protocol):
    """Where members ask for a relay."""

    @property
    def open(self) -> bool: ...


class Errands:
    """Answers `knows`, and passes `punch` on. On the loop thread."""

    def __init__(self, links: Mapping[bytes, Link], desk: Desk) -> None:
        """links: by peer, a live view."""
        self._links = links
        self._desk = desk
        self._punches = Throttle(rate=_PUNCHES_PER_S, burst=_PUNCHES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Do nothing more for anybody."""
        for task in self._tasks:
            task.cancel()

    def admits(self, link: Link) -> bool:
        """Whether a peer may cause one more meeting now."""
        return self._punches.admits(link.peer_id, time.monotonic())

    def knows(self, link: Link, message: Message) -> None:
        """Somebody asks whether we have a link to a peer. Raises ProtocolError."""
        other = self._links.get(peer_in(message, "peer"))
        answer: Message = {"t": KNOWS, "linked": other is not None}
        if other is not None:
            answer |= {"rtt": other.rtt, "relays": self._desk.open}
        link.reply(message, answer)

    def punch(self, link: Link, message: Message) -> None:
        """Somebody wants to meet a peer to which we have a link. Raises ProtocolError."""
        punching.parse_offer(message)
        other = self._links.get(peer_in(message, "to"))
        if other is None or not self.admits(link):
            link.reply(message, {"t": PUNCH, "no": "unlinked" if other is None else "busy"})
            return
        offer = {name: message[name] for name in ("at", "by", "rtt")}
        task = asyncio.get_running_loop().create_task(self._pass(link, message, other, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, link: Link, message: Message, other: Link, offer: Mapping[str, Any]) -> None:
        try:
            answer = await other.request({"t": PUNCH, "from": link.peer_id, **offer}, PASS_S)
        except (TimeoutError, UnreachableError):
            logger.debug("peer %s did not answer whom it was to meet", short_id(other.peer_id))
            answer = {"no": "silent"}
        said: Message = {name: answer[name] for name in ("at", "no") if name in answer}
        link.reply(message, {"t": PUNCH, **said})


def peer_in(message: Mapping[str, Any], name: str) -> bytes:
    """The peer id of a message. Raises ProtocolError."""
    peer = message.get(name)
    if not isinstance(peer, bytes) or len(peer) != PEER_ID_BYTES:
        raise ProtocolError("a word about a peer without its id")
    return peer
