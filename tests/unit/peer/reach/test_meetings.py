"""Links between peers that do not dial each other: through a member that both reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2pavg.credentials import Authority
from p2pavg.errors import UnreachableError
from p2pavg.membership.table.address import wildcard
from p2pavg.peer.reach import meetings
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.streams import keeper as stream_keeper
from p2pavg.transport.ways import hole
from p2pavg.transport.ways.hole import Hole
from tests.unit.peer.reach.introduced import Introduced, until
from tests.unit.transport.engine_swarm import ENGINES


@asynccontextmanager
async def three(
    closed: bool = False, kind: str = "python", streams: int = 2
) -> AsyncIterator[list[Introduced]]:
    """Two peers and a member to which both have links."""
    authority = Authority.new("run") if closed else None
    hosts = []
    for _ in range(3):
        credentials = None if authority is None else authority.member()
        identity = None if credentials is None else credentials.identity
        hosts.append(await Introduced(identity, kind=kind).start(credentials=credentials, streams=streams))
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
    await until(lambda: one.engine.streams(link.id))


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


async def test_a_link_without_data_streams_is_relayed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the control connection passes the NATs and no data stream does, the pair is relayed then."""
    monkeypatch.setattr(stream_keeper, "_BACKOFF_S", (0.01, 0.01))
    async with three() as (one, two, _):

        async def nothing(peer: bytes) -> CountedSocket:
            raise UnreachableError("not through these")

        monkeypatch.setattr(one.introductions._meetings, "_stream", nothing)
        assert await one.introductions.meet(two.id)
        await one.until(lambda: one.down)
        assert one.down[0][1] == "no data stream gets through"
        await two.until(lambda: one.id not in two.endpoint.links)
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.RELAYED)


async def test_who_cannot_come_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no member tells the other side its port, it refuses, and the side that asked turns to a relay
    without waiting for an answer that does not come.
    """
    async with three() as (one, two, _):

        async def unobserved(*_: Any) -> Any:
            raise UnreachableError("nobody tells")

        monkeypatch.setattr(two.introductions._meetings, "_observe", unobserved)
        assert await asyncio.wait_for(one.introductions.meet(two.id), 20)
        await is_whole(one, two, Way.RELAYED)


async def test_a_meeting_that_takes_long_does_not_delay_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relayed link is there while the two still try to meet, and the direct one takes its place."""
    monkeypatch.setattr(meetings.punching, "relay_after_s", lambda rtt_s: 0.0)
    async with three() as (one, two, _):
        met, meet = asyncio.Event(), Hole.meet

        async def late(self: Hole, *args: Any, **options: Any) -> CountedSocket:
            await met.wait()
            return await meet(self, *args, **options)

        monkeypatch.setattr(Hole, "meet", late)
        assert await asyncio.wait_for(one.introductions.meet(two.id), 20)
        await is_whole(one, two, Way.RELAYED)
        met.set()
        await until(lambda: one.endpoint.links.get(two.id) and one.link_to(two).way is Way.PUNCHED)
        await until(lambda: two.endpoint.links.get(one.id) and two.link_to(one).way is Way.PUNCHED)


async def test_a_relayed_link_that_gives_way_to_a_direct_one_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the two there is no link for a moment: whoever asked for one waits for the direct one."""
    monkeypatch.setattr(meetings.punching, "relay_after_s", lambda rtt_s: 0.0)
    async with three() as (one, two, _):
        gone, mine = asyncio.Event(), one.introductions._meetings
        punched = mine._punched

        async def relayed(*_: Any) -> bool:
            gone.set()
            return True

        async def late(*args: Any) -> bool:
            await gone.wait()
            return await punched(*args)

        monkeypatch.setattr(mine, "_relayed", relayed)
        monkeypatch.setattr(mine, "_punched", late)
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.PUNCHED)


async def test_another_member_is_asked_when_the_first_cannot_tell_the_other_side() -> None:
    """The nearest member has lost its link to the other peer, or refuses: the next one passes the word."""
    async with three() as (one, two, member):
        second = await Introduced().start()
        for peer in (one, two):
            await peer.connect(second)
        await second.until(lambda: len(second.endpoint.links) == 2)
        member.introductions._errands.punch = lambda link, message: link.reply(  # type: ignore[method-assign]
            message, {"t": "punch", "no": "unlinked"}
        )
        one.link_to(member)._rtt = 0.0  # the nearest
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.PUNCHED)
        await second.close()


@asynccontextmanager
async def of_two_families() -> AsyncIterator[list[Introduced]]:
    """Two peers and a member that have both families; one has its link to the member over IPv6, the other
    over IPv4, and the member announces both.
    """
    hosts = [await Introduced().start(listen_host="::") for _ in range(3)]
    one, two, member = hosts
    places = [(address, member.endpoint.port) for address in ("name.example", "127.0.0.1", "::1")]
    for host in hosts:
        host.introductions._meetings._places = lambda peer: places if peer == member.id else ()
    try:
        await one.endpoint.connect("::1", member.endpoint.port, timeout=20.0)
        await two.endpoint.connect("127.0.0.1", member.endpoint.port, timeout=20.0)
        yield hosts
    finally:
        for host in hosts:
            await host.close()


@pytest.mark.skipif(wildcard() != "::", reason="this system has no IPv6")
@pytest.mark.parametrize("passes", [4, 6])
async def test_two_peers_of_both_families_meet_by_the_one_that_passes(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The family of the other side's link to the member comes first, and then the other one, at the address
    that the member announces.
    """
    tried: list[int] = []
    meet = Hole.meet

    async def some(self: Hole, *args: Any, speaks: bool) -> CountedSocket:
        family = 6 if self._family == socket.AF_INET6 else 4
        tried.extend([family] if speaks else [])
        if family != passes:
            raise UnreachableError("not through these")
        return await meet(self, *args, speaks=speaks)

    monkeypatch.setattr(Hole, "meet", some)
    async with of_two_families() as (one, two, _):
        assert await one.introductions.meet(two.id)
        assert tried[: 1 if passes == 4 else 2] == ([4] if passes == 4 else [4, 6])
        await is_whole(one, two, Way.PUNCHED)
        assert one.link_to(two).address[0] == ("127.0.0.1" if passes == 4 else "::1")


@pytest.mark.parametrize(("through", "rest_s"), [(4, 0.5), (3, 60.0)])
async def test_four_data_streams_of_many_are_enough(
    through: int, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the NATs let some of the streams through, the link is used with these; the others are tried again
    after a long pause if there are four, and soon if there are fewer.
    """
    monkeypatch.setattr(stream_keeper, "_BACKOFF_S", (0.01, 0.01))
    monkeypatch.setattr(stream_keeper, "_REST_S", rest_s)
    async with three(streams=8) as (one, two, _):
        met, stream = [0.0], one.introductions._meetings._stream

        async def some(peer: bytes) -> CountedSocket:
            met.append(asyncio.get_running_loop().time())
            if len(met) - 1 > through:
                raise UnreachableError("no more through these")
            return await stream(peer)

        monkeypatch.setattr(one.introductions._meetings, "_stream", some)
        assert await one.introductions.meet(two.id)
        await until(lambda: len(met) - 1 >= 8 + 8 - through)
        link = one.link_to(two)
        assert len(one.engine.streams(link.id)) == through
        assert not link.closed
        came = max(met[1:9])
        assert (met[9] - came >= rest_s) is (through == 4)


async def test_pauses_between_streams_stay_finite() -> None:
    """However often no stream opens, the next one is tried."""
    async with three() as (one, two, _):
        assert await one.introductions.meet(two.id)
        keeper = one.endpoint._keepers[one.link_to(two).id]
        keeper._failures = 5000
        assert 0 < keeper._pause() <= stream_keeper._REST_S


@pytest.mark.parametrize("passes", [True, False])
async def test_a_link_that_loses_its_last_stream_gets_others_or_ends(
    passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the pause is in which fewer streams than wanted had to do; and where none passes any more,
    the link ends, so that the pair is relayed.
    """
    monkeypatch.setattr(stream_keeper, "_BACKOFF_S", (0.01, 0.01))
    async with three() as (one, two, _):
        opened, stream, through = 0, one.introductions._meetings._stream, [1]

        async def some(peer: bytes) -> CountedSocket:
            nonlocal opened
            opened += 1
            if not through:
                raise UnreachableError("no more through these")
            through.pop()
            return await stream(peer)

        monkeypatch.setattr(one.introductions._meetings, "_stream", some)
        assert await one.introductions.meet(two.id)
        link = one.link_to(two)
        await until(lambda: one.engine.streams(link.id))
        keeper = one.endpoint._keepers[link.id]
        keeper._failures, before = 50, opened  # the next pause lasts half a minute, at least
        await until(lambda: keeper._failures > 50 or opened > before)
        through[:] = [1] * 9 if passes else []  # one may fail that the machine was too busy for
        one.engine.detach(link.id, one.engine.streams(link.id)[0])
        if passes:
            await until(lambda: one.engine.streams(link.id))
            assert not link.closed
        else:
            await until(lambda: link.closed)
            assert link.impassable


async def test_streams_are_punched_again() -> None:
    """A data stream that ends on such a link is opened again the same way."""
    async with three() as (one, two, _):
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.PUNCHED)
        link = one.link_to(two)
        await until(lambda: len(one.engine.streams(link.id)) == 2)
        first = set(one.engine.streams(link.id))
        two.engine.detach(two.link_to(one).id, min(first))
        await until(lambda: len(set(one.engine.streams(link.id)) - first) == 1)


@pytest.mark.parametrize(
    "message",
    [
        {"t": "punch", "at": [], "by": b"x" * 20, "rtt": 0.1},
        {"t": "punch", "to": b"short", "at": [["127.0.0.1", 9]], "by": b"x" * 20, "rtt": 0.1},
        {"t": "punch", "from": 5, "at": [["127.0.0.1", 9]], "by": b"x" * 20, "rtt": 0.1},
        {"t": "knows"},
        {"t": "relay", "to": None},
        {"t": "tunnel", "from": b""},
    ],
)
async def test_nonsense_ends_the_link(message: dict[str, object]) -> None:
    """Who asks for a meeting or a tunnel in a way that no peer does loses the link, and nobody else does."""
    async with three() as (one, two, member):
        one.link_to(member).send(message)
        await one.until(lambda: member.id not in one.endpoint.links)
        assert await two.link_to(member).alive(10.0)


async def test_nobody_has_a_peer_hold_more_sockets_than_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks to be met many times at once is told to come again; the sockets are free after that."""
    over = asyncio.Event()

    async def waits(self: Hole, *args: Any, **options: Any) -> CountedSocket:
        await over.wait()
        raise UnreachableError("nobody came")

    monkeypatch.setattr(Hole, "meet", waits)
    monkeypatch.setattr(meetings, "MOST_OF_ONE", 3)
    async with three() as (one, two, member):
        link = await one.connect(two)
        offer = {"t": "punch", "at": [["127.0.0.1", 9]], "by": member.id, "rtt": 0.0}
        answers = await asyncio.gather(*(link.request(dict(offer), 10.0) for _ in range(8)))
        assert sum("at" in answer for answer in answers) == 3
        assert sum(answer.get("no") == "busy" for answer in answers) == 5
        over.set()
        await until(lambda: not two.introductions._meetings._answered)
        assert "at" in await link.request(dict(offer), 10.0)


async def test_a_relayed_link_becomes_a_direct_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could not be met at first is tried again, and a link that nobody relays takes the place."""
    monkeypatch.setattr(meetings, "IMPROVE_S", (0.2, 0.2))
    monkeypatch.setattr(hole, "available", lambda: False)
    async with three() as (one, two, member):
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, Way.RELAYED)
        monkeypatch.setattr(hole, "available", lambda: True)
        await until(lambda: one.endpoint.links.get(two.id) and one.link_to(two).way is Way.PUNCHED)
        await until(lambda: two.endpoint.links.get(one.id) and two.link_to(one).way is Way.PUNCHED)
        await is_whole(one, two, Way.PUNCHED)
        await until(lambda: not member.introductions._desk.relay.pairs)
