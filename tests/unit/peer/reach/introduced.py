"""Peers in one process that introduce each other: what the tests of meetings and relays share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pavg.peer.reach.introductions import Introductions
from tests.unit.transport.endpoints import Host


class Introduced(Host):
    """A host that answers what others ask of it, as a peer does."""

    relay_bps = 1e9
    hidden = False

    async def start(self, **options: Any) -> Introduced:
        await super().start(**options)
        self.introductions = Introductions(self.endpoint, lambda: self.relay_bps, lambda: self.hidden)
        self.on_message = self.introductions.message
        return self

    def link_down(self, link: Any, reason: str) -> None:
        self.introductions.link_down(link)
        super().link_down(link, reason)

    async def close(self) -> None:
        self.introductions.close()
        await super().close()


async def until(happened: Callable[[], object]) -> None:
    """What no event tells of."""
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
