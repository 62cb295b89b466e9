"""Links to all trainers in view: who is dialled, when, and what became of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Container
from dataclasses import dataclass

from p2pavg.errors import CredentialError, IdentityInUseError, IncompatiblePeerError, P2PAvgError
from p2pavg.identity import short_id
from p2pavg.membership import PeerInfo, View
from p2pavg.peer.reach.gaps import Gaps
from p2pavg.rounds.loop.hello import trains
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link
from p2pavg.transport.ways import punching

logger = logging.getLogger("p2pavg.peer.peer")

DIAL_TIMEOUTS_S = (1.5, 2.5, 5.0)  # in turn: a kernel that is not answered pauses longer than most cuts last
DIAL_BACKOFF_S = (0.2, 5.0)
LOST_BACKOFF_S = 1.0  # the longest pause for a peer whose link was lost less than so long ago:
LOST_S = 60.0
SHORTEST_LINK_S = 1.0  # seconds: a link that ends sooner counts as a failed dial, and the next waits longer
MOST_FAILED = 8  # failed dials in a row, beyond which the pause before the next one grows no more
JOIN_TIMEOUT_S = 10.0
LINKED_TIMEOUT_S = 1.0
SILENT_S = 2.0  # seconds: a link that brings nothing for so long may be dead, and is dialled anew
HANGS_S = 1.0  # seconds: other peers are asked about a trainer when a dial to it takes longer, or fails
GAPS_S = 1.0  # seconds that a newcomer waits for the answers of others about trainers it cannot link to


@dataclass(slots=True)
class _Dial:
    task: asyncio.Task[None]
    began: float
    failed: bool = False


class Dialler:
    """Dials every trainer in view that has no link, until it has one. Runs on the loop thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        view: View,
        refused: Callable[[bytes, P2PAvgError], None],
        apart: Callable[[frozenset[bytes]], None],
        *,
        meet: Callable[[bytes], Awaitable[bool]] | None = None,
        is_hidden: Callable[[], bool] = lambda: False,
        most: int = MAX_LINKS,
        skip: Container[bytes] = (),
    ) -> None:
        """refused: called with a peer that wants no link to this one, and its reason. apart: called with all
        trainers that others reach and this peer does not. meet: tries to get a link to a peer that cannot be
        dialled, and returns whether there is one; None: nobody tries. is_hidden: whether nobody can dial this
        peer. most: links and dials together, beyond which nobody else is dialled. skip: a live view of peers
        that are not dialled.
        """
        self._most = most
        self._skip = skip
        self._endpoint = endpoint
        self._view = view
        self._refused = refused
        self._meet = meet
        self._is_hidden = is_hidden
        self._joined = False  # others know this peer by now, and may be faster
        self._gaps = Gaps(endpoint.links, apart)
        self._dials: dict[bytes, _Dial] = {}
        self._untried: dict[bytes, asyncio.Future[None]] = {}
        self._brief: dict[bytes, int] = {}  # by peer: links in a row that ended at once
        self._silent_since: dict[bytes, float] = {}
        self._lost_at: dict[bytes, float] = {}
        self._closed = False

    @property
    def apart(self) -> frozenset[bytes]:
        """Trainers that others reach and this peer cannot link to."""
        return self._gaps.peers

    def close(self) -> None:
        """Dial nobody any more."""
        self._closed = True
        self._gaps.close()
        for dial in self._dials.values():
            dial.task.cancel()

    def look(self) -> None:
        """Dial the trainers without a link, after the view or the links have changed."""
        if self._closed:
            return
        # Those that only help come last: where there are too many, links to trainers are worth more.
        for peer_id, info in sorted(self._view.peers.items(), key=lambda seen: seen[1].role != "trainer"):
            linked = peer_id in self._endpoint.links or peer_id in self._dials
            if linked or not self._is_wanted(info) or peer_id in self._skip:
                continue
            if len(self._endpoint.links.keys() | self._dials.keys()) >= self._most:
                return
            self._untried[peer_id] = asyncio.get_running_loop().create_future()
            self._start(peer_id)

    def _is_wanted(self, info: PeerInfo) -> bool:
        """Whether to dial a peer: a trainer, or one that helps this peer to links. There is no telling in
        advance which two cannot dial each other (families, routes, NATs), so everybody knows all helpers. A
        client_only peer dials this one, unless this one is hidden as well.
        """
        if info.client_only:
            return self._is_hidden() and info.role == "trainer"
        return info.role == "trainer" or self._meet is not None

    def beat(self, silent: Collection[bytes]) -> None:
        """Dial anew where a link may be dead. Called several times a second.

        silent: linked peers from which nothing comes. Either such a peer stands still, or its link is dead
        and nobody has closed it, as after a change of address.
        """
        if self._closed:
            return
        now = time.monotonic()
        silent = {*silent, *self._silent_helpers()}
        self._silent_since = {peer: self._silent_since.get(peer, now) for peer in silent}
        for peer_id, since in self._silent_since.items():
            if now - since >= SILENT_S and peer_id not in self._dials and self._can_be_tried(peer_id):
                self._start(peer_id, anew=True)
        self._look_for_gaps(now)

    def _silent_helpers(self) -> list[bytes]:
        """Those that only help send no heartbeats; but their links carry pings each second."""
        others = [link for link in self._endpoint.links.values() if not trains(link.hello)]
        return [link.peer_id for link in others if link.dialled and link.quiet_s >= SILENT_S]

    def link_down(self, link: Link) -> None:
        """Note how long the link lasted, which has just ended."""
        now = time.monotonic()
        self._lost_at = {peer: at for peer, at in self._lost_at.items() if now < at + LOST_S}
        self._lost_at[link.peer_id] = now
        if now - link.established_at >= SHORTEST_LINK_S:
            self._brief.pop(link.peer_id, None)
        elif link.peer_id in self._brief or len(self._brief) < MAX_LINKS:
            self._brief[link.peer_id] = min(self._brief.get(link.peer_id, 0) + 1, MOST_FAILED)

    async def first_links(self, enough: Callable[[], bool]) -> None:
        """Wait until every trainer in view was dialled once, or until `enough()`.

        A newcomer with a link waits a second at most for one that does not answer, such as a dead peer that
        is still in the table; then it asks others whether that peer lives.
        """
        started = time.monotonic()
        while self._untried and not enough():
            company = any(trains(link.hello) for link in self._endpoint.links.values())
            patience = LINKED_TIMEOUT_S if company else JOIN_TIMEOUT_S
            left = started + patience - time.monotonic()
            if left <= 0:
                break
            wait = min(left, LINKED_TIMEOUT_S)
            await asyncio.wait(
                list(self._untried.values()), timeout=wait, return_when=asyncio.FIRST_COMPLETED
            )
        if self._endpoint.links and not enough():
            self._look_for_gaps(time.monotonic())
            await self._gaps.settled(GAPS_S)
            await self._first_meeting(started + JOIN_TIMEOUT_S, enough)
        self._joined = True

    async def _first_meeting(self, until: float, enough: Callable[[], bool]) -> None:
        """Wait, where all links are to helpers, for the first one to a trainer that they reach: its word
        tells a newcomer where the run stands.
        """
        while not enough() and not any(trains(link.hello) for link in self._endpoint.links.values()):
            awaited = [dial.task for peer_id, dial in self._dials.items() if peer_id in self._gaps.peers]
            left = until - time.monotonic()
            if not awaited or left <= 0:
                return
            await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _can_be_tried(self, peer_id: bytes) -> bool:
        info = self._view.peers.get(peer_id)
        return info is not None and self._is_wanted(info)

    def _look_for_gaps(self, now: float) -> None:
        links = self._endpoint.links
        hanging = [
            peer_id
            for peer_id, dial in self._dials.items()
            if peer_id not in links and (dial.failed or now - dial.began >= HANGS_S)
        ]
        self._gaps.look([peer_id for peer_id in hanging if peer_id in self._view.peers])

    def _start(self, peer_id: bytes, *, anew: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(self._dial(peer_id, anew))
        self._dials[peer_id] = _Dial(task, time.monotonic())

    def _wanted(self, peer_id: bytes, anew: bool) -> bool:
        if self._closed:
            return False
        return peer_id not in self._endpoint.links or (anew and peer_id in self._silent_since)

    async def _dial(self, peer_id: bytes, anew: bool) -> None:
        pause, most = DIAL_BACKOFF_S
        tries = itertools.cycle(DIAL_TIMEOUTS_S)
        brief = self._brief.get(peer_id, 0)
        try:
            if brief:
                await asyncio.sleep(min(pause * 2.0 ** (brief - 1), most))
            while self._wanted(peer_id, anew):
                if await self._try(peer_id, anew, next(tries)):
                    return
                self._dials[peer_id].failed = True
                self._tried(peer_id)
                lost = anew or time.monotonic() < self._lost_at.get(peer_id, -LOST_S) + LOST_S
                await asyncio.sleep(min(pause, LOST_BACKOFF_S) if lost else pause)
                pause = min(2 * pause, most)
        finally:
            self._dials.pop(peer_id, None)
            self._tried(peer_id)

    async def _try(self, peer_id: bytes, anew: bool, timeout: float) -> bool:
        """Dial the peer's addresses one after the other. True: do not dial it again."""
        info = self._view.peers.get(peer_id)
        if info is None:
            return True
        if info.client_only or peer_id in self._gaps.peers:
            if await self._arrange(peer_id, anew):
                return True
            if info.client_only:
                return False
        for host, port in self._view.addresses_to_dial(info):
            try:
                await self._endpoint.connect(host, port, expect=peer_id, timeout=timeout, anew=anew)
                return True
            except (IncompatiblePeerError, CredentialError, IdentityInUseError) as error:
                self._refused(peer_id, error)
                return True
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("no link to %s at %s:%d: %s", short_id(peer_id), host, port, error)
        self._view.missed(info)
        return False

    async def _arrange(self, peer_id: bytes, anew: bool) -> bool:
        if self._meet is None:
            return False
        await asyncio.sleep(punching.head_start_s(self._endpoint.peer_id, peer_id, newcomer=not self._joined))
        return not self._wanted(peer_id, anew) or await self._meet(peer_id)

    def _tried(self, peer_id: bytes) -> None:
        tried = self._untried.pop(peer_id, None)
        if tried is not None and not tried.done():
            tried.set_result(None)
