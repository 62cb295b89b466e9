"""Meetings: links to peers that cannot be dialled, arranged by a member to which both sides have links."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from p2pavg.errors import P2PAvgError, UnreachableError
from p2pavg.identity import short_id
from p2pavg.membership.table.address import family_of, is_numeric
from p2pavg.peer.reach.common import CommonMember, CommonMembers, hosts_of
from p2pavg.peer.reach.errands import PASS_S, PUNCH, Errands, peer_in
from p2pavg.peer.reach.impassable import Impassable
from p2pavg.peer.reach.relaying import Ahead, Tunnels
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.handshake import Refusal
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.ways import hole, punching
from p2pavg.transport.ways.hole import Hole

logger = logging.getLogger("p2pavg.peer.peer")

T = TypeVar("T")
Addresses = tuple[punching.Address, ...]

OBSERVED_S = 3.0
GREETING_S = 5.0
SILENT_S = 2.0  # a link that was not heard for so long may be dead
IMPROVE_S = (60.0, 3600.0)  # the first pause before a relayed link is to become a direct one, and the longest
FAR_S = 0.15  # a round trip through the relay, from which on the first data stream is prepared in advance
MOST_ANSWERED, MOST_OF_ONE = 128, 64  # meetings at once that others asked for: each takes three sockets
MOST_WORDS = 3  # members through which the other side is told, where it cannot be told or cannot answer

Places = Callable[[bytes], Sequence[punching.Address]]
"""The addresses that a member announces."""


class _NotMetError(UnreachableError):
    """The other side was not told, or could not come: another member, or family, may do."""


class Meetings:
    """On the loop thread."""

    def __init__(self, endpoint: Endpoint, errands: Errands, tunnels: Tunnels, places: Places) -> None:
        self._endpoint = endpoint
        self._errands = errands
        self._tunnels = tunnels
        self._places = places
        self._common = CommonMembers(endpoint)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answered: Counter[bytes] = Counter()  # by whose link the word came over
        self._impassable = Impassable()

    def link_down(self, link: Link) -> None:
        """A link ended; one that never had a data stream is not made that way again for some time."""
        if link.way is Way.PUNCHED and link.impassable:
            self._impassable.failed(link.peer_id, time.monotonic())
        elif link.way is Way.PUNCHED and link.ready.done() and not link.ready.cancelled():
            self._impassable.passed(link.peer_id)

    def close(self) -> None:
        """Meet nobody any more."""
        for task in self._tasks:
            task.cancel()

    # -- this side asks

    async def meet(self, peer: bytes) -> bool:
        """Try to get a link: through the NATs, and through a relay where that fails or takes long. Whether
        there is one.
        """
        helpers = await self._common.to(peer)
        if not helpers:
            return peer in self._endpoint.links
        ways = []
        if self._passable(peer, helpers):
            ways.append(self._spawn(self._punched(peer, helpers)))
            await asyncio.wait(ways, timeout=punching.relay_after_s(helpers[0].rtt_s))
        if not ways or not ways[0].done() or not ways[0].result():
            ways.append(self._spawn(self._relayed(peer, helpers)))
        for done in asyncio.as_completed(ways):
            if await done and peer in self._endpoint.links:
                break  # else the relayed link has just given way to the direct one, which is not there yet
        if ways[0].done() and len(ways) == 2 and ways[0].result():
            ways[1].cancel()  # a direct link is there
        return peer in self._endpoint.links

    def _passable(self, peer: bytes, helpers: Sequence[CommonMember]) -> bool:
        hosts = hosts_of(helpers)
        return hole.available() and not self._impassable.bars(peer, hosts, time.monotonic())

    async def _punched(self, peer: bytes, helpers: Sequence[CommonMember]) -> bool:
        """Whether there is a link through the NATs now."""
        self._impassable.meets(peer, hosts_of(helpers))
        tried: set[int] = set()  # families: through other members it would be the same NATs
        for helper in helpers[:MOST_WORDS]:
            for family in helper.families:
                if family in tried:
                    continue
                try:
                    await self.punch(peer, helper, family)
                    return True
                except _NotMetError as error:
                    logger.debug("peer %s was not told: %s", short_id(peer), error)
                except (P2PAvgError, OSError, TimeoutError) as error:
                    logger.debug("peer %s was not met through the NATs: %s", short_id(peer), error)
                    tried.add(family)
        return False

    async def _relayed(self, peer: bytes, helpers: Sequence[CommonMember]) -> bool:
        """Whether there is a link now, carried by a member."""
        for helper in sorted(helpers, key=lambda helper: not helper.relays):
            link = self._endpoint.links.get(peer)
            if link is not None and link.quiet_s < SILENT_S:
                return True
            try:
                await self.relay(peer, helper)
                return True
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("no link to peer %s through a relay: %s", short_id(peer), error)
        return False

    async def punch(self, peer: bytes, helper: CommonMember, family: int) -> Link:
        """A link through holes in both NATs, over IPv4 or IPv6. Raises P2PAvgError, OSError, TimeoutError."""
        at = self._seen_from(helper.link, family)
        if at is None:
            raise _NotMetError(f"no address of IPv{family} is known for the member between the two")
        with self._hole(family) as port:
            try:
                mine = await self._observe(port, at)
            except (P2PAvgError, OSError, TimeoutError) as error:
                raise _NotMetError(f"no member tells what the NAT makes of a port ({error})") from None
            theirs = await self._told(helper.link, {"to": peer}, mine, helper.link.peer_id, helper.rtt_s)
            targets = punching.on_word(punching.targets(mine, theirs), helper.link.local_host)
            sock = await port.meet(targets, helper.rtt_s, speaks=True)
        sock.way = Way.PUNCHED
        link = await self._endpoint.greet(sock, peer, partial(self._stream, peer), GREETING_S)
        logger.info("peer %s is linked through both sides' NATs", short_id(peer))
        return link

    async def _stream(self, peer: bytes) -> CountedSocket:
        """One more connection to a peer that was met so. Raises P2PAvgError, OSError, TimeoutError."""
        link = self._endpoint.links.get(peer)
        found = None if link is None else self._observer(family_of(link.address[0]))
        if link is None or found is None:
            raise UnreachableError("no member is left that could tell what the NAT makes of a port")
        rtt_s = min(link.rtt, punching.MOST_RTT_S)
        with self._hole(family_of(found[1][0])) as port:
            mine = await self._observe(port, found[1])
            theirs = await self._told(link, {}, mine, found[0].peer_id, rtt_s)
            targets = punching.at_host(link.address[0], mine, theirs)
            sock = await port.meet(targets, rtt_s, speaks=True)
        sock.way = Way.PUNCHED
        return sock

    async def _told(
        self, word: Link, to: Message, mine: Addresses, observer: bytes, rtt_s: float
    ) -> Addresses:
        """Where the other side can be dialled, once it was told the same of this one. word: the link over
        which it is told.
        """
        offer = punching.Offer(mine, observer, rtt_s)
        try:
            answer = await word.request({"t": PUNCH, **to, **offer.to_message()}, PASS_S)
        except (TimeoutError, UnreachableError) as error:
            raise _NotMetError(f"the other side was not told ({error})") from None
        if "no" in answer:
            raise _NotMetError("the other side does not meet this peer now")
        return punching.parse_addresses(answer.get("at"))

    def _observer(self, family: int, wanted: bytes = b"") -> tuple[Link, punching.Address] | None:
        """A member that tells what the NAT makes of a port, the wanted one if possible, and its address."""
        observers = sorted(self._common.observers(), key=lambda link: link.peer_id != wanted)
        found = ((link, self._seen_from(link, family)) for link in observers)
        return next(((link, at) for link, at in found if at is not None), None)

    def _seen_from(self, member: Link, family: int) -> punching.Address | None:
        """Where a member can be dialled over one family."""
        places = (member.address, *self._places(member.peer_id))
        return next((at for at in places if is_numeric(at[0]) and family_of(at[0]) == family), None)

    def _hole(self, family: int) -> Hole:
        if not hole.available():
            raise UnreachableError("sockets of this system cannot share a port")
        return Hole(self._endpoint.make_socket, socket.AF_INET6 if family == 6 else socket.AF_INET)

    async def _observe(self, port: Hole, at: punching.Address) -> Addresses:
        try:
            async with asyncio.timeout(OBSERVED_S):
                return await port.observe(*at, self._endpoint.party)
        except Refusal as refusal:
            raise refusal.error() from None

    async def relay(self, peer: bytes, helper: CommonMember) -> Link:
        """A link that a member carries. Raises P2PAvgError, OSError, TimeoutError."""
        sock = await self._tunnels.open(peer, helper.link)
        far = helper.rtt_s >= FAR_S
        ahead = Ahead(self._tunnels.open(peer, helper.link) if far else None)
        opener = partial(self._tunnel, peer, helper.link.peer_id, ahead)
        try:
            link = await self._endpoint.greet(sock, peer, opener, GREETING_S)
        except BaseException:
            ahead.close()
            raise
        logger.info("peer %s is linked through peer %s", short_id(peer), short_id(helper.link.peer_id))
        self._spawn(self._improve(peer, link))
        return link

    async def _improve(self, peer: bytes, link: Link) -> None:
        """NATs change, and whatever hindered a meeting may be over: try again, ever more rarely."""
        pause, most = IMPROVE_S
        while not link.closed:
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)
            helpers = [] if link.closed else await self._common.to(peer)
            if helpers and self._passable(peer, helpers):
                await self._punched(peer, helpers)

    async def _tunnel(self, peer: bytes, relay: bytes, ahead: Ahead) -> CountedSocket:
        """One more connection through the same relay."""
        if (sock := await ahead.take()) is not None:
            return sock
        link = self._endpoint.links.get(relay)
        if link is None:
            raise UnreachableError(f"the link to the relay {short_id(relay)} is gone")
        return await self._tunnels.open(peer, link)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- the other side asks

    def asked(self, link: Link, message: Message) -> None:
        """Somebody wants to meet us: the link's peer, or one for whom a member speaks. Raises
        ProtocolError.
        """
        offer = punching.parse_offer(message)
        coordinated = "from" in message
        if coordinated:
            peer_in(message, "from")
        peer = link.peer_id
        full = self._answered.total() >= MOST_ANSWERED or self._answered[peer] >= MOST_OF_ONE
        if full or not self._errands.admits(link, coordinated=coordinated):
            link.reply(message, {"t": PUNCH, "no": "busy"})
            return
        self._answered[peer] += 1
        task = self._spawn(self._answer(link, message, offer, coordinated=coordinated))
        task.add_done_callback(partial(self._was_answered, peer))

    def _was_answered(self, peer: bytes, task: asyncio.Task[None]) -> None:
        self._answered -= Counter([peer])  # none of them stay with a count of zero

    async def _answer(
        self, link: Link, message: Message, offer: punching.Offer, *, coordinated: bool
    ) -> None:
        """coordinated: the word came from a member, which has seen the other side's port, and is to see ours.
        Else the other side speaks for itself: its streams come from where its link does.
        """
        family, rtt_s = family_of(offer.at[0][0]), offer.rtt_s
        try:
            if coordinated:
                at = self._seen_from(link, family)
            else:
                rtt_s = min(rtt_s, 2 * link.rtt + punching.LEAST_BURST_S)
                found = self._observer(family, offer.observer)
                at = None if found is None else found[1]
            if at is None:
                raise UnreachableError("no member tells what the NAT makes of a port")
            port = self._hole(family)
        except (P2PAvgError, OSError) as error:
            self._refuse(link, message, error)
            return
        with port:
            try:
                mine = await self._observe(port, at)
                if coordinated:
                    targets = punching.on_word(punching.targets(mine, offer.at), link.local_host)
                else:
                    targets = punching.at_host(link.address[0], mine, offer.at)
            except (P2PAvgError, OSError, TimeoutError) as error:
                self._refuse(link, message, error)
                return
            link.reply(message, {"t": PUNCH, "at": [list(address) for address in mine]})
            try:
                await asyncio.sleep(rtt_s / 2)  # the answer arrives, and the other side dials too
                sock = await port.meet(targets, rtt_s, speaks=False)
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("who asked over the link to %s was not met: %s", short_id(link.peer_id), error)
                return
        sock.way = Way.PUNCHED
        self._endpoint.welcome(sock)

    def _refuse(self, link: Link, message: Message, error: Exception) -> None:
        """At once: whoever asked waits for an answer, and has other ways."""
        logger.debug("who asks over the link to %s cannot be met: %s", short_id(link.peer_id), error)
        link.reply(message, {"t": PUNCH, "no": "unobserved"})
