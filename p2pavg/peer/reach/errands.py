"""Errands: what a member does for two others that have no link to each other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Mapping
from typing import Any, Protocol

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.identity import PEER_ID_BYTES, short_id
from p2pavg.membership.table.throttle import Throttle
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways import punching

logger = logging.getLogger("p2pavg.peer.peer")

KNOWS = "knows"  # asks a peer whether it has a link to another
PUNCH = "punch"  # a side of a meeting tells the other where it can be dialled
QUIET_S = 5.0  # pings come each second: a peer from which nothing came for so long may be dead
PASS_S = 6.0  # how long the one that is asked to meet may take to answer
# Of one peer; each has the other side send a dozen packets, or two dozen where it is refused.
_MEETINGS_PER_S, _MEETINGS_AT_ONCE = 5.0, 128.0  # with peers that a member coordinates
_STREAMS_PER_S, _STREAMS_AT_ONCE = 20.0, 400.0  # with itself, for a data stream


class Desk(Protocol):
    """Where members ask for a relay."""

    @property
    def open(self) -> bool: ...


class Errands:
    """Answers `knows`, and passes `punch` on. On the loop thread."""

    def __init__(
        self, links: Mapping[bytes, Link], desk: Desk, observed: Container[punching.Address]
    ) -> None:
        """links: by peer, a live view. observed: addresses of connections that were told how they are seen
        here, and are still open; a live view.
        """
        self._links = links
        self._desk = desk
        self._observed = observed
        self._meetings = Throttle(rate=_MEETINGS_PER_S, burst=_MEETINGS_AT_ONCE)
        self._streams = Throttle(rate=_STREAMS_PER_S, burst=_STREAMS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Do nothing more for anybody."""
        for task in self._tasks:
            task.cancel()

    def admits(self, link: Link, *, coordinated: bool) -> bool:
        """Whether a peer may cause one more meeting now. coordinated: not with itself."""
        of = self._meetings if coordinated else self._streams
        return of.admits(link.peer_id, time.monotonic())

    def knows(self, link: Link, message: Message) -> None:
        """Somebody asks whether we have a link to a peer. Raises ProtocolError."""
        other = self._links.get(peer_in(message, "peer"))
        linked = other is not None and other.quiet_s < QUIET_S
        answer: Message = {"t": KNOWS, "linked": linked}
        if linked and other is not None:
            hosts = [link.address[0], other.address[0]]
            answer |= {"rtt": other.rtt, "relays": self._desk.open, "hosts": hosts}
        link.reply(message, answer)

    def punch(self, link: Link, message: Message) -> None:
        """Somebody wants to meet a peer to which we have a link. Raises ProtocolError.

        What each side is told of the other is our own word: a port that we have seen, and how long a word
        takes. So nobody has others dial whom it likes.
        """
        offer = punching.parse_offer(message)
        other, no = self._links.get(peer_in(message, "to")), None
        if other is None:
            no = "unlinked"
        elif not self.admits(link, coordinated=True):
            no = "busy"
        elif offer.at[0] not in self._observed:
            no = "unobserved"
        if no is not None or other is None:
            link.reply(message, {"t": PUNCH, "no": no})
            return
        rtt_s = min(link.rtt + other.rtt, punching.MOST_RTT_S)
        told = punching.Offer(offer.at, offer.observer, rtt_s).to_message()
        task = asyncio.get_running_loop().create_task(self._pass(link, message, other, told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, link: Link, message: Message, other: Link, offer: Mapping[str, Any]) -> None:
        said: Message = {"no": "silent"}
        try:
            answer = await other.request({"t": PUNCH, "from": link.peer_id, **offer}, PASS_S)
            if "no" in answer:
                said = {"no": answer["no"]}
            elif punching.parse_addresses(answer.get("at"))[0] in self._observed:
                said = {"at": answer["at"]}
            else:
                said = {"no": "unobserved"}
        except (TimeoutError, UnreachableError, ProtocolError):
            logger.debug("peer %s did not answer whom it was to meet", short_id(other.peer_id))
        link.reply(message, {"t": PUNCH, **said})


def peer_in(message: Mapping[str, Any], name: str) -> bytes:
    """The peer id of a message. Raises ProtocolError."""
    peer = message.get(name)
    if not isinstance(peer, bytes) or len(peer) != PEER_ID_BYTES:
        raise ProtocolError("a word about a peer without its id")
    return peer
