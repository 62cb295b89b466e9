"""Gaps: trainers that other members have links to, and this peer cannot link to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from p2pavg.errors import UnreachableError
from p2pavg.peer.reach.errands import KNOWS
from p2pavg.peer.reach.rota import Rota
from p2pavg.rounds.loop.hello import trains
from p2pavg.transport.links.link import Link

ANSWER_S = 2.0
AGAIN_S = 3.0  # seconds until others are asked again: a peer that died meanwhile is no gap


class Gaps:
    """Asks other members about those that this one cannot link to. Runs on the loop thread."""

    def __init__(self, links: Mapping[bytes, Link], changed: Callable[[frozenset[bytes]], None]) -> None:
        """links: a live view, by peer. changed: called with all peers behind gaps whenever they change."""
        self._links = links
        self._changed = changed
        self._rota = Rota()
        self._asked_at: dict[bytes, float] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self.peers: frozenset[bytes] = frozenset()

    def look(self, unlinked: Collection[bytes]) -> None:
        """Ask about these trainers: they are in view, and dials to them have failed or hang."""
        now = time.monotonic()
        for peer in [p for p in self._asked_at if p not in unlinked]:
            del self._asked_at[peer]
            self._rota.forget(peer)
        self._are(self.peers.intersection(unlinked))
        for peer in unlinked:
            if now - self._asked_at.get(peer, -AGAIN_S) >= AGAIN_S and peer not in self._asking:
                self._asked_at[peer] = now
                task = asyncio.get_running_loop().create_task(self._ask(peer))
                self._asking[peer] = task
                task.add_done_callback(partial(self._answered, peer))

    def _answered(self, peer: bytes, task: asyncio.Task[None]) -> None:
        self._asking.pop(peer, None)

    async def settled(self, timeout: float) -> None:
        """Wait until all questions are answered, at most so many seconds."""
        if self._asking:
            await asyncio.wait(list(self._asking.values()), timeout=timeout)

    def close(self) -> None:
        """Ask nobody any more."""
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, peer: bytes) -> None:
        asked = self._rota.next(peer, self._members())
        said = await asyncio.gather(*(self._linked(link, peer) for link in asked))
        if peer in self._asked_at and not any(said):  # else somebody linked to it meanwhile
            self._are(self.peers - {peer})

    def _members(self) -> list[Link]:
        """Who answers: those that train and, first, those that only help. A monitor knows nobody."""
        trainers = [link for link in self._links.values() if trains(link.hello)]
        others = [link for link in self._links.values() if not trains(link.hello)]
        return [link for link in others if not link.hello.get("client_only")] + trainers

    async def _linked(self, link: Link, peer: bytes) -> bool:
        try:
            told = await link.request({"t": KNOWS, "peer": peer}, ANSWER_S)
        except (TimeoutError, UnreachableError):
            told = {}
        linked = told.get("linked") is True
        self._rota.told(peer, link.peer_id, knows=linked)
        if linked and peer in self._asked_at:  # one word is enough: others may take longer
            self._are(self.peers | {peer})
        return linked

    def _are(self, peers: frozenset[bytes]) -> None:
        if peers != self.peers:
            self.peers = peers
            self._changed(peers)
