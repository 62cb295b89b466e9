"""Introductions: links between members that cannot dial each other, arranged by those that reach both."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.peer.reach.errands import KNOWS, PUNCH, Errands
from p2pavg.peer.reach.meetings import Meetings, Places
from p2pavg.peer.reach.relaying import RELAY, TUNNEL, RelayDesk, Tunnels
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link, Message


class Introductions:
    """All that one peer does so, for itself and for others. On the loop thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        relay_bps: Callable[[], float],
        is_hidden: Callable[[], bool],
        places: Places = lambda peer: (),
    ) -> None:
        """relay_bps: bit/s that this peer relays at most; 0.0: it relays for nobody. is_hidden: whether
        nobody can dial this peer. places: the addresses that a member announces.
        """
        self._desk = RelayDesk(endpoint, relay_bps, is_hidden)
        self._tunnels = Tunnels(endpoint)
        self._errands = Errands(endpoint.links, self._desk, endpoint.reception.observed)
        self._meetings = Meetings(endpoint, self._errands, self._tunnels, places)

    @property
    def relayed_bytes(self) -> int:
        """What this peer has passed on for others."""
        return self._desk.relay.passed_on

    async def meet(self, peer: bytes) -> bool:
        """Try to get a link to a peer that cannot be dialled. Whether there is one."""
        return await self._meetings.meet(peer)

    def link_down(self, link: Link) -> None:
        """A link ended."""
        self._desk.link_down(link)
        self._meetings.link_down(link)

    def message(self, link: Link, message: Message) -> bool:
        """Whether the message was one of these, and is answered. Raises ProtocolError."""
        kind = message.get("t")
        if kind == KNOWS:
            self._errands.knows(link, message)
        elif kind == PUNCH and "to" in message:
            self._errands.punch(link, message)
        elif kind == PUNCH:
            self._meetings.asked(link, message)
        elif kind == RELAY:
            self._desk.asked(link, message)
        elif kind == TUNNEL:
            self._tunnels.asked(link, message)
        else:
            return False
        return True

    def close(self) -> None:
        """Arrange nothing any more."""
        self._meetings.close()
        self._errands.close()
        self._tunnels.close()
        self._desk.close()
