"""Meetings: links to peers that cannot be dialled, arranged by a member to which both sides have links."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2pavg.errors import P2PAvgError, UnreachableError
from p2pavg.identity import short_id
from p2pavg.peer.reach.errands import KNOWS, PASS_S, PUNCH, Errands, peer_in
from p2pavg.peer.reach.relaying import Tunnels
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.handshake import Refusal
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways import hole, punching
from p2pavg.transport.ways.hole import Hole

logger = logging.getLogger("p2pavg.peer.peer")

ASKED = 8  # members, the nearest ones, whether they have a link to whom we lack
ANSWER_S = 2.0
OBSERVED_S = 3.0
GREETING_S = 5.0
SILENT_S = 2.0  # a link that was not heard for so long may be dead
IMPROVE_S = (60.0, 3600.0)  # the first pause before a relayed link is to become a direct one, and the longest


@dataclass(frozen=True, slots=True)
class CommonMember:
    """A member to which both sides have links."""

    link: Link
    rtt_s: float  # from this peer to the other one and back, through it
    relays: bool


class Meetings:
    """On the loop thread."""

    def __init__(self, endpoint: Endpoint, errands: Errands, tunnels: Tunnels) -> None:
        self._endpoint = endpoint
        self._errands = errands
        self._tunnels = tunnels
        self._tasks: set[asyncio.Task[None]] = set()
        self._impassable: set[bytes] = set()  # with whom a link came about, and no data stream

    def link_down(self, link: Link) -> None:
        """A link ended; one that never had a data stream is not made that way again."""
        if link.way is Way.PUNCHED and link.impassable:
            self._impassable.add(link.peer_id)

    def close(self) -> None:
        """Meet nobody any more."""
        for task in self._tasks:
            task.cancel()

    # -- this side asks

    async def meet(self, peer: bytes) -> bool:
        """Try to get a link: through the NATs, and else through a relay. Whether there is one."""
        helpers = await self.helpers(peer)
        if helpers and hole.available() and peer not in self._impassable:
            try:
                await self.punch(peer, helpers[0])
                return True
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("peer %s was not met through the NATs: %s", short_id(peer), error)
        for helper in helpers:
            link = self._endpoint.links.get(peer)
            if link is not None and link.quiet_s < SILENT_S:
                return True
            try:
                await self.relay(peer, helper)
                return True
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("no link to peer %s through a relay: %s", short_id(peer), error)
        return peer in self._endpoint.links

    async def helpers(self, peer: bytes) -> list[CommonMember]:
        """Members through which a word to the peer gets, the quickest first."""
        asked = self._observers()[:ASKED]
        answers = await asyncio.gather(*(self._ask(link, peer) for link in asked))
        return sorted((found for found in answers if found is not None), key=lambda found: found.rtt_s)

    def _observers(self) -> list[Link]:
        """Members that this peer can dial, the nearest first."""
        links = self._endpoint.links.values()
        straight = [link for link in links if link.way is Way.DIRECT and not link.hello.get("client_only")]
        return sorted(straight, key=lambda link: link.rtt)

    async def _ask(self, link: Link, peer: bytes) -> CommonMember | None:
        try:
            told = await link.request({"t": KNOWS, "peer": peer}, ANSWER_S)
        except (TimeoutError, UnreachableError):
            return None
        rtt = told.get("rtt")
        if told.get("linked") is not True or not isinstance(rtt, float) or not rtt >= 0:
            return None
        return CommonMember(link, min(link.rtt + rtt, punching.MOST_RTT_S), told.get("relays") is True)

    async def punch(self, peer: bytes, helper: CommonMember) -> Link:
        """A link through holes in both NATs. Raises P2PAvgError, OSError, TimeoutError."""
        sock = await self._met(helper.link, helper.link, helper.rtt_s, {"to": peer})
        link = await self._endpoint.greet(sock, peer, partial(self._stream, peer), GREETING_S)
        logger.info("peer %s is linked through both sides' NATs", short_id(peer))
        return link

    async def _stream(self, peer: bytes) -> CountedSocket:
        """One more connection to a peer that was met so. Raises P2PAvgError, OSError, TimeoutError."""
        link = self._endpoint.links.get(peer)
        observers = self._observers()
        if link is None or not observers:
            raise UnreachableError("no member is left that could tell what the NAT makes of a port")
        return await self._met(link, observers[0], min(link.rtt, punching.MOST_RTT_S), {})

    async def _met(self, word: Link, observer: Link, rtt_s: float, to: Message) -> CountedSocket:
        """word: the link over which the other side is told."""
        with self._hole(observer) as port:
            mine = await self._observe(port, observer)
            offer = punching.Offer(mine, observer.peer_id, rtt_s)
            answer = await word.request({"t": PUNCH, **to, **offer.to_message()}, PASS_S)
            if "no" in answer:
                raise UnreachableError("the other side does not meet this peer now")
            theirs = punching.parse_addresses(answer.get("at"))
            sock = await port.meet(punching.targets(mine, theirs), rtt_s, speaks=True)
        sock.way = Way.PUNCHED
        return sock

    def _hole(self, observer: Link) -> Hole:
        if not hole.available():
            raise UnreachableError("sockets of this system cannot share a port")
        family = socket.AF_INET6 if ":" in observer.address[0] else socket.AF_INET
        return Hole(self._endpoint.make_socket, family)

    async def _observe(self, port: Hole, observer: Link) -> tuple[punching.Address, ...]:
        try:
            async with asyncio.timeout(OBSERVED_S):
                return await port.observe(*observer.address, self._endpoint.party)
        except Refusal as refusal:
            raise refusal.error() from None

    async def relay(self, peer: bytes, helper: CommonMember) -> Link:
        """A link that a member carries. Raises P2PAvgError, OSError, TimeoutError."""
        sock = await self._tunnels.open(peer, helper.link)
        opener = partial(self._tunnel, peer, helper.link.peer_id)
        link = await self._endpoint.greet(sock, peer, opener, GREETING_S)
        logger.info("peer %s is linked through peer %s", short_id(peer), short_id(helper.link.peer_id))
        self._spawn(self._improve(peer, link))
        return link

    async def _improve(self, peer: bytes, link: Link) -> None:
        """NATs change, and whatever hindered a meeting may be over: try again, ever more rarely."""
        pause, most = IMPROVE_S
        while not link.closed:
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)
            if link.closed or peer in self._impassable or not hole.available():
                continue
            for helper in (await self.helpers(peer))[:1]:
                try:
                    await self.punch(peer, helper)
                except (P2PAvgError, OSError, TimeoutError) as error:
                    logger.debug("peer %s is still out of reach: %s", short_id(peer), error)

    async def _tunnel(self, peer: bytes, relay: bytes) -> CountedSocket:
        """One more connection through the same relay."""
        link = self._endpoint.links.get(relay)
        if link is None:
            raise UnreachableError(f"the link to the relay {short_id(relay)} is gone")
        return await self._tunnels.open(peer, link)

    # -- the other side asks

    def asked(self, link: Link, message: Message) -> None:
        """Somebody wants to meet us: the link's peer, or one for whom it speaks. Raises ProtocolError."""
        offer = punching.parse_offer(message)
        peer = peer_in(message, "from") if "from" in message else link.peer_id
        if not self._errands.admits(link):
            link.reply(message, {"t": PUNCH, "no": "busy"})
            return
        self._spawn(self._answer(link, message, peer, offer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, link: Link, message: Message, peer: bytes, offer: punching.Offer) -> None:
        observers = self._observers()
        chosen = [one for one in observers if one.peer_id == offer.observer] or observers
        if not chosen:
            link.reply(message, {"t": PUNCH, "no": "unobserved"})
            return
        try:
            with self._hole(chosen[0]) as port:
                mine = await self._observe(port, chosen[0])
                link.reply(message, {"t": PUNCH, "at": [list(address) for address in mine]})
                await asyncio.sleep(offer.rtt_s / 2)  # the answer arrives, and the other side dials too
                sock = await port.meet(punching.targets(mine, offer.at), offer.rtt_s, speaks=False)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("peer %s was not met: %s", short_id(peer), error)
            return
        sock.way = Way.PUNCHED
        self._endpoint.welcome(sock)
