"""A member that relays: for whom, how much, and what it and strangers can do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.errors import P2PAvgError, ProtocolError, UnreachableError
from p2pavg.peer.reach import meetings
from p2pavg.peer.reach.common import CommonMember
from p2pavg.peer.runtime import Runtime
from p2pavg.transport.links import handshake
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.ways import relay
from p2pavg.transport.ways.relay import Relay, enter
from tests.unit.peer.reach.introduced import Introduced, until
from tests.unit.peer.reach.test_meetings import is_whole, three

ONE, TWO = b"1" * 20, b"2" * 20
PARTY = Party.of("run", closed=False)


async def relayed(one: Introduced, two: Introduced, member: Introduced) -> None:
    """Link two by relay, whatever else is possible."""
    helper = CommonMember(one.link_to(member), 0.01, True)
    await one.introductions._meetings.relay(two.id, helper)
    await is_whole(one, two, Way.RELAYED)


async def test_a_relay_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two peers of an open run say through a relay, in words or on streams, it does not see."""
    seen = bytearray()
    write = Relay._write

    def note(relay: Relay, flow: relay._Flow) -> None:
        seen.extend(flow.pending)
        write(relay, flow)

    async with three() as (one, two, member):
        monkeypatch.setattr(Relay, "_write", note)
        await relayed(one, two, member)
        word = os.urandom(64)
        one.link_to(two).send({"t": "told", "word": word})
        await two.until(lambda: any(message.get("word") == word for _, message in two.messages))
        assert member.introductions.relayed_bytes > 1000
        assert len(seen) > 1000
        assert word not in seen
        for secret in (one.link_to(two).secret, one.id, b"schema", b"incarnation"):
            assert secret not in seen


async def test_far_peers_ask_for_the_first_stream_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tunnel of the first data stream is asked for before the link is there, used once, and closed when
    no link comes about.
    """
    monkeypatch.setattr(meetings, "FAR_S", 0.0)
    async with three() as (one, two, member):
        await relayed(one, two, member)
        await until(lambda: len(one.engine.streams(one.link_to(two).id)) == 2)
        relay_of = member.introductions._desk.relay
        assert relay_of.pairs[frozenset((one.id, two.id))] == 3  # the control connection, and two streams
        one.link_to(two).close("again")
        await until(lambda: not relay_of.pairs)

        async def refused(*_: object) -> None:
            await until(lambda: relay_of.pairs[frozenset((one.id, two.id))] == 2)
            raise UnreachableError("no link")

        monkeypatch.setattr(one.endpoint, "greet", refused)
        with pytest.raises(UnreachableError):
            await one.introductions._meetings.relay(two.id, CommonMember(one.link_to(member), 0.01, True))
        await until(lambda: not any(len(tunnel.ends) == 2 for tunnel in relay_of._tunnels.values()))


async def test_a_relay_cannot_be_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that joins the tunnel to itself instead of the peer gets no link in the peer's name."""
    async with three() as (one, two, member):
        sock = await wire.dial("127.0.0.1", member.endpoint.port, one.endpoint.make_socket)
        sock.way = Way.RELAYED
        monkeypatch.setattr(member.endpoint, "tls", lambda way: member.endpoint._without)
        with pytest.raises(UnreachableError, match="no longer at that address"):
            await one.endpoint.greet(sock, two.id, None, 10.0)  # type: ignore[arg-type]


async def test_who_does_not_relay_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """With a cap of 0 a member refuses; the peer that asked logs one sentence, once, with what to do."""
    async with three() as (one, two, member):
        member.relay_bps = 0.0
        helper = CommonMember(one.link_to(member), 0.01, True)
        for _ in range(2):
            with pytest.raises(UnreachableError, match="start it with max_relay_mbps above 0"):
                await one.introductions._meetings.relay(two.id, helper)
        warned = [r for r in caplog.records if r.levelno == logging.WARNING and "does not relay" in r.message]
        assert len(warned) == 1


async def test_a_relay_is_for_its_own_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tunnel leads to whom the relay has no direct link, nor to oneself; each peer asks so often only."""
    async with three() as (one, two, member):
        for nobody in (ONE, one.id):
            helper = CommonMember(one.link_to(member), 0.01, True)
            with pytest.raises(UnreachableError, match="no link to that peer"):
                await one.introductions._meetings.relay(nobody, helper)
        answers = [await one.link_to(member).request({"t": "relay", "to": two.id}, 10.0) for _ in range(80)]
        refused = [answer["no"] for answer in answers if "no" in answer]
        assert set(refused) <= {"FULL", "BUSY"}
        assert sum("token" in answer for answer in answers) <= relay.MOST_OF_ONE


async def test_tunnels_end_with_the_link_to_the_relay() -> None:
    """Who is no member any more is relayed no more."""
    async with three() as (one, two, member):
        await relayed(one, two, member)
        assert member.introductions._desk.relay.pairs
        one.link_to(member).close("revoked")
        await one.until(lambda: two.id not in one.endpoint.links)
        await two.until(lambda: one.id not in two.endpoint.links)
        await until(lambda: not member.introductions._desk.relay.pairs)


@asynccontextmanager
async def relay_at(rate: float) -> AsyncIterator[tuple[Relay, int]]:
    """A relay alone, at a port of its own."""
    host = await Introduced().start()
    made = Relay(host.endpoint.party, lambda: rate)
    host.endpoint.reception.tunnels = made.claim
    try:
        yield made, host.endpoint.port
    finally:
        made.close()
        await host.close()


async def end(port: int, token: bytes) -> CountedSocket:
    sock = await wire.dial("127.0.0.1", port, CountedSocket)
    try:
        async with asyncio.timeout(10):
            await enter(sock, token, PARTY)
    except BaseException:
        sock.close()
        raise
    return sock


async def test_a_relay_keeps_its_cap_and_uses_it() -> None:
    """Bytes pass intact, in both directions, at 0.9 to 1.1 of the cap."""
    rate, seconds = 4e6, 2.0
    data = os.urandom(int(rate * seconds / 2))
    async with relay_at(rate) as (made, port):
        tokens = made.open(ONE, TWO)
        socks = await asyncio.gather(*(end(port, token) for token in tokens))
        began = time.monotonic()
        sends = [asyncio.create_task(wire.send(sock, data)) for sock in socks]
        got = await asyncio.gather(*(wire.receive(sock, len(data)) for sock in socks))
        took = time.monotonic() - began
        await asyncio.gather(*sends)
        assert got == [data, data]
        assert made.passed_on == 2 * len(data)
        assert 0.9 * seconds <= took <= seconds / 0.9
        socks[0].close()
        assert await asyncio.get_running_loop().sock_recv(socks[1], 1) == b""
        socks[1].close()


async def test_a_token_is_good_once() -> None:
    """A stranger has none, and nobody enters an end twice or after the tunnel's time."""
    async with relay_at(1e6) as (made, port):
        tokens = made.open(ONE, TWO)
        for wrong in (b"x" * relay.TOKEN_BYTES, b"", b"x" * 2000):
            with pytest.raises((P2PAvgError, OSError)):
                await end(port, wrong)
        first = asyncio.create_task(end(port, tokens[0]))
        await until(lambda: any(tunnel.ends for tunnel in made._tunnels.values()))
        with pytest.raises((P2PAvgError, OSError)):
            await end(port, tokens[0])
        made.forget(TWO)
        with pytest.raises((P2PAvgError, OSError)):
            await first
        assert not made._tunnels
        assert not made._of


async def test_a_tunnel_ends_with_a_connection_that_is_cut() -> None:
    """Whoever waits for the other end may be cut, as one connection of too many: the tunnel is given up."""
    async with relay_at(1e6) as (made, port):
        tokens = made.open(ONE, TWO)
        before = asyncio.all_tasks()
        first = asyncio.create_task(end(port, tokens[0]))
        await until(lambda: any(tunnel.ends for tunnel in made._tunnels.values()))
        for task in asyncio.all_tasks() - before - {first}:
            task.cancel()
        with pytest.raises((P2PAvgError, OSError)):
            await first
        with pytest.raises((P2PAvgError, OSError)):
            await end(port, tokens[1])
        assert not made._tunnels
        assert not made._of


async def test_tunnels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer has so many at most, and all together so many; unclaimed ones end by themselves. A pair that
    has most gives way to one that has few.
    """
    monkeypatch.setattr(relay, "CLAIM_S", 0.2)
    monkeypatch.setattr(relay, "MOST_TUNNELS", 40)
    made = Relay(PARTY, lambda: 1e6)
    for _ in range(relay.MOST_OF_ONE):
        assert made.make_room(ONE, TWO)
        made.open(ONE, TWO)
    assert not made.make_room(ONE, TWO)
    others = [bytes([number]) * 20 for number in range(60)]
    for other in others:
        if made.make_room(ONE, other):
            made.open(ONE, other)
        assert made._of[ONE] <= relay.MOST_OF_ONE
        assert sum(made.pairs.values()) <= relay.MOST_TUNNELS
    assert made.pairs[frozenset((ONE, TWO))] == 1
    assert made.pairs[frozenset((ONE, others[0]))] == 1
    assert not made.make_room(ONE, others[-1])
    for other, another in itertools.pairwise(others):
        if made.make_room(other, another):
            made.open(other, another)
    assert sum(made.pairs.values()) == relay.MOST_TUNNELS
    await until(lambda: not made._tunnels)
    assert made.make_room(ONE, TWO)
    made.close()


async def test_a_relay_that_answers_nonsense_is_left() -> None:
    """What is no answer of a relay ends the connection, not the peer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(handshake.preamble(handshake.TUNNEL, PARTY) + handshake.pack({"ok": 5}))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ProtocolError, match="a relay that does not answer"):
            await end(server.sockets[0].getsockname()[1], b"t" * relay.TOKEN_BYTES)


@pytest.mark.parametrize(
    ("wished", "measured", "relayed"),
    [(None, None, 10e6), (None, 0.0, 10e6), (None, 80e6, 20e6), (5e6, 80e6, 5e6), (0.0, 80e6, 0.0)],
)
def test_a_quarter_of_the_upload_is_relayed(
    wished: float | None, measured: float | None, relayed: float
) -> None:
    """Unless the user says how much: a quarter of what was measured, and 10 Mb/s before."""
    driver = None if measured is None else SimpleNamespace(upload_bps=measured)
    peer: Any = SimpleNamespace(settings=SimpleNamespace(relay_bps=wished), driver=driver)
    assert Runtime._relay_bps(peer) == relayed
