"""Links to all trainers in view: who is dialled, when, and what became of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from p2pavg.errors import CredentialError, IdentityInUseError, IncompatiblePeerError, P2PAvgError
from p2pavg.identity import short_id
from p2pavg.membership import View
from p2pavg.transport.links.budget import MAX_LINKS
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.peer.peer")

DIAL_TIMEOUT_S = 5.0
DIAL_BACKOFF_S = (0.2, 5.0)
LASTING_S = 1.0  # a link that ends sooner was none
MOST_BRIEF = 8  # such links in a row, beyond which the pause before the next dial grows no more
JOIN_TIMEOUT_S = 10.0
LINKED_TIMEOUT_S = 1.0


class Dialler:
    """Dials every trainer in view that has no link, until it has one. Runs on the loop thread."""

    def __init__(self, endpoint: Endpoint, view: View, refused: Callable[[bytes, P2PAvgError], None]) -> None:
        """refused: told that a peer wants no link to this one, and why."""
        self._endpoint = endpoint
        self._view = view
        self._refused = refused
        self._dialling: dict[bytes, asyncio.Task[None]] = {}
        self._untried: dict[bytes, asyncio.Future[None]] = {}
        self._brief: dict[bytes, int] = {}  # links in a row that ended at once: to whom is dialled less often
        self._closed = False

    def close(self) -> None:
        """Dial nobody any more."""
        self._closed = True
        for task in self._dialling.values():
            task.cancel()

    def look(self) -> None:
        """The view or the links changed."""
        if self._closed:
            return
        for peer_id, info in self._view.peers.items():
            linked = peer_id in self._endpoint.links or peer_id in self._dialling
            if linked or info.client_only or info.role != "trainer":
                continue
            loop = asyncio.get_running_loop()
            self._untried[peer_id] = loop.create_future()
            self._dialling[peer_id] = loop.create_task(self._dial(peer_id))

    def link_down(self, link: Link) -> None:
        """A link ended."""
        if time.monotonic() - link.established_at >= LASTING_S:
            self._brief.pop(link.peer_id, None)
        elif link.peer_id in self._brief or len(self._brief) < MAX_LINKS:
            self._brief[link.peer_id] = min(self._brief.get(link.peer_id, 0) + 1, MOST_BRIEF)

    async def first_links(self, enough: Callable[[], bool]) -> None:
        """Until everybody in view was tried once, or `enough`. Who does not answer, such as a dead peer that
        is still in the table, holds up a newcomer that has a link for a second at most.
        """
        started = time.monotonic()
        while self._untried and not enough():
            patience = LINKED_TIMEOUT_S if self._endpoint.links else JOIN_TIMEOUT_S
            left = started + patience - time.monotonic()
            if left <= 0:
                return
            wait = min(left, LINKED_TIMEOUT_S)
            await asyncio.wait(
                list(self._untried.values()), timeout=wait, return_when=asyncio.FIRST_COMPLETED
            )

    async def _dial(self, peer_id: bytes) -> None:
        pause, most = DIAL_BACKOFF_S
        brief = self._brief.get(peer_id, 0)
        try:
            if brief:
                await asyncio.sleep(min(pause * 2.0 ** (brief - 1), most))
            while not self._closed and peer_id not in self._endpoint.links:
                info = self._view.peers.get(peer_id)
                if info is None:
                    return
                for host, port in self._view.addresses_to_dial(info):
                    try:
                        await self._endpoint.connect(host, port, expect=peer_id, timeout=DIAL_TIMEOUT_S)
                        return
                    except (IncompatiblePeerError, CredentialError, IdentityInUseError) as error:
                        self._refused(peer_id, error)
                        return
                    except (P2PAvgError, OSError, TimeoutError) as error:
                        logger.debug("no link to %s at %s:%d: %s", short_id(peer_id), host, port, error)
                self._tried(peer_id)
                await asyncio.sleep(pause)
                pause = min(2 * pause, most)
        finally:
            self._dialling.pop(peer_id, None)
            self._tried(peer_id)

    def _tried(self, peer_id: bytes) -> None:
        tried = self._untried.pop(peer_id, None)
        if tried is not None and not tried.done():
            tried.set_result(None)
