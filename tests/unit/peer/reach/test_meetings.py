"""Links between peers that do not dial each other: through a member that both reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2pavg.credentials import Authority
from p2pavg.transport.links.carried import Way
from p2pavg.transport.ways import hole
from tests.unit.peer.reach.introduced import Introduced
from tests.unit.transport.engine_swarm import ENGINES


@asynccontextmanager
async def three(closed: bool = False, kind: str = "python") -> AsyncIterator[list[Introduced]]:
    """Two peers and a member to which both have links."""
    authority = Authority.new("run") if closed else None
    hosts = []
    for _ in range(3):
        credentials = None if authority is None else authority.member()
        identity = None if credentials is None else credentials.identity
        hosts.append(await Introduced(identity, kind=kind).start(credentials=credentials))
    one, two, member = hosts
    try:
        for peer in (one, two):
            await peer.connect(member)
        await member.until(lambda: len(member.endpoint.links) == 2)
        yield hosts
    finally:
        for host in hosts:
            await host.close()


async def is_whole(one: Introduced, two: Introduced, way: Way) -> None:
    """Both ends have the link, with data streams, and words pass it."""
    await two.until(lambda: one.id in two.endpoint.links)
    link = one.link_to(two)
    assert (link.way, two.link_to(one).way) == (way, way)
    assert await link.alive(5.0)
    async with asyncio.timeout(20):
        await link.ready
    await one.until(lambda: one.engine.streams(link.id))


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
async def test_two_peers_meet(closed: bool, kind: str) -> None:
    """Two peers that dial each other at once have an ordinary link, of an open run and of a closed one."""
    async with three(closed, kind) as (one, two, _):
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.PUNCHED)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
async def test_a_member_relays(closed: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the two cannot meet, a third carries an ordinary link between them."""
    monkeypatch.setattr(hole, "available", lambda: False)
    async with three(closed, kind) as (one, two, member):
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.RELAYED)
        assert member.introductions.relayed_bytes > 0
