"""The table over TCP: nodes that UDP does not reach join, store, find and beat like the others."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from p2pavg.errors import UnreachableError
from p2pavg.identity import Identity
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table import serving
from p2pavg.membership.table.carrying import shares, streams
from p2pavg.membership.table.carrying.carrier import Carrier
from p2pavg.membership.table.carrying.ways import BOTH, FIRST_AGAIN_SECONDS, TCP, UDP, Ways
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.table.ledger import AddressLedger
from p2pavg.membership.table.record import key_of
from p2pavg.membership.table.wire import MAX_DATAGRAM, Flag, RequestKind, decode, encode
from p2pavg.membership.view import View
from p2pavg.peer.peer import Peer
from p2pavg.transport.links.listening import TablePort

DEADLINE_S = 30.0
KEY = key_of("test", "tcp")


class Nodes:
    """Real nodes on loopback."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dropped: set[int] = set()  # ports of nodes that UDP does not reach, and that it does not leave
        self._made: list[tuple[DHT, TablePort]] = []
        send = Carrier.send

        def lossy(self_: Carrier, data: bytes, address: tuple[str, int]) -> bool:
            assert self_._udp is not None
            own = self_._udp.get_extra_info("sockname")[1]
            if self.dropped.isdisjoint({own, address[1]}):
                return send(self_, data, address)
            return self_._ledger.spend(address, len(data))

        monkeypatch.setattr(Carrier, "send", lossy)

    async def start(self, *ways_in: DHT, udp: bool = True, client_only: bool = False) -> DHT:
        port = TablePort("127.0.0.1", 0)
        if not udp:
            self.dropped.add(port.port)
        dht = await DHT.start(
            Identity.generate(),
            host="127.0.0.1",
            port=port.port,
            initial_peers=[("127.0.0.1", way_in.port) for way_in in ways_in],
            client_only=client_only,
            attach=None if client_only else port.attach,
        )
        self._made.append((dht, port))
        return dht

    async def stop(self) -> None:
        for dht, port in self._made:
            await dht.stop()
            await port.close()


@asynccontextmanager
async def nodes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    made = Nodes(monkeypatch)
    try:
        yield made
    finally:
        await made.stop()


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not fact():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


async def test_without_udp_nodes_join_store_and_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of nodes that all lack UDP: what one stores the others find, and each knows that it is deaf."""
    async with nodes(monkeypatch) as made:
        first = await made.start(udp=False)
        others = [await made.start(first, udp=False) for _ in range(3)]
        assert await others[0].store(KEY, b"value", 60.0)
        for dht in others[1:]:
            assert {record.value for record in (await dht.get(KEY)).values()} == {b"value"}
        await until(lambda: all(dht.is_deaf for dht in others))
        await until(lambda: first.contacts == 3)


@pytest.mark.parametrize("deaf_first", [True, False])
async def test_one_node_without_udp_among_others(monkeypatch: pytest.MonkeyPatch, deaf_first: bool) -> None:
    """Nodes with and without UDP are one table, whichever of them is the way in; only the one is deaf."""
    async with nodes(monkeypatch) as made:
        first = await made.start(udp=not deaf_first)
        second = await made.start(first, udp=deaf_first)
        third = await made.start(second)
        await until(lambda: third.contacts == 2)
        assert await third.store(KEY, b"3", 60.0)
        assert await first.store(KEY, b"1", 60.0)
        assert len(await second.get(KEY)) == 2
        assert len(await third.get(KEY)) == 2
        assert (first if deaf_first else second).node.rpc.carrier.is_deaf
        assert not third.node.rpc.carrier.is_deaf


async def test_views_without_udp_are_as_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers see each other come and go, and stay in view by their beats, over TCP alone."""
    async with nodes(monkeypatch) as made:
        views: list[View] = []
        first: DHT | None = None
        for _ in range(3):
            dht = await made.start(*([first] if first else []), udp=False)
            first = first or dht
            view = View(dht, "run", lifetime=1.5)
            await view.refresh_now()
            await view.announce(PeerInfo(dht.identity.peer_id, (("127.0.0.1", dht.port),)))
            views.append(view)
        await until(lambda: all(len(view.peers) == 2 for view in views))
        loop = asyncio.get_running_loop()
        stays_until = loop.time() + 3.0  # two lifetimes
        while loop.time() < stays_until:
            assert all(len(view.peers) == 2 for view in views)
            await asyncio.sleep(0.05)
        await views[2].leave()
        await until(lambda: all(len(view.peers) == 1 for view in views[:2]))
        for view in views:
            view.close()


async def test_who_takes_no_connections_is_answered_over_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client behind something that lets nothing in reads and stores over TCP, and nobody lists it."""
    async with nodes(monkeypatch) as made:
        first = await made.start()
        client = await made.start(first, udp=False, client_only=True)
        assert await client.store(KEY, b"c", 60.0)
        assert len(await first.get(KEY)) == 1
        assert first.contacts == 0


async def test_udp_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is deaf goes back to UDP at once when its address, and so its network, may have changed."""
    monkeypatch.setattr("p2pavg.membership.table.carrying.ways.FIRST_AGAIN_SECONDS", 3600.0)
    async with nodes(monkeypatch) as made:
        first = await made.start()
        second = await made.start(first, udp=False)
        await until(lambda: second.node.rpc.carrier.is_deaf)
        made.dropped.clear()
        second.review_address()
        assert await second.node.ping(("127.0.0.1", first.port)) is not None
        await until(lambda: not second.node.rpc.carrier.is_deaf)


async def test_udp_that_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose network drops UDP from some moment on goes on over TCP."""
    async with nodes(monkeypatch) as made:
        first = await made.start()
        second = await made.start(first)
        await until(lambda: first.contacts == 1)
        assert not second.node.rpc.carrier.is_deaf
        made.dropped.add(second.port)
        for _ in range(2):
            assert await second.node.ping(("127.0.0.1", first.port)) is not None
            await until(lambda: not second.node.rpc.carrier._asked_twice)
            second.node.rpc.carrier.ways.changed()  # as if two seconds had passed
        assert second.node.rpc.carrier.is_deaf


async def test_nobody_answers() -> None:
    """When neither UDP nor TCP answers, joining says so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnreachableError, match="over UDP or TCP"):
        await DHT.start(
            Identity.generate(),
            host="127.0.0.1",
            port=0,
            initial_peers=[("127.0.0.1", port)],
            join_timeout=0.5,
        )


# -- hostile connections


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def request(kind: RequestKind, body: list[object]) -> bytes:
    return encode(kind, 0, os.urandom(8), b"s" * 20, bytes(8), body)


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))


@pytest.mark.parametrize(
    "raw",
    [
        streams.head(1)[:6] + bytes([9]) + streams.head(1)[7:],
        streams.head(1)[:-1] + b"x",
        streams.head(1) + b"\0\0",
        streams.head(1) + (MAX_DATAGRAM + 1).to_bytes(2, "big"),
        b"GET / HTTP/1.1\r\n",
    ],
)
async def test_impossible_bytes_end_the_connection(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Another version, other first bytes, and frames of no or too many bytes close it."""
    async with nodes(monkeypatch) as made:
        node = await made.start()
        reader, writer = await connect(node.port)
        writer.write(raw)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionError):
                assert await reader.read() in (b"", streams.head(node.port))
        writer.close()


async def test_a_request_is_answered_over_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks over TCP receives there: the answer is whole, and garbage in between is ignored."""
    async with nodes(monkeypatch) as made:
        node = await made.start()
        reader, writer = await connect(node.port)
        writer.write(
            streams.head(0)
            + streams.pack_frame(b"garbage")
            + streams.pack_frame(request(RequestKind.PING, []))
        )
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readexactly(16) == streams.head(node.port)
            message = decode(await answer(reader))
        assert message is not None
        assert message.flags & Flag.ANSWER
        writer.close()


async def test_a_flood_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one source no more is served over TCP than over UDP, and what is beyond waits at the sender."""
    async with nodes(monkeypatch) as made:
        node = await made.start()
        served = 0
        handle = node.node.handle

        def count(*args: object) -> object:
            nonlocal served
            served += 1
            return handle(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(node.node, "handle", count)
        _, writer = await connect(node.port)
        writer.write(streams.head(0))
        one = streams.pack_frame(request(RequestKind.PING, []))
        began = asyncio.get_running_loop().time()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(2.0):
                while True:
                    writer.write(one * 100)
                    await writer.drain()
        took = asyncio.get_running_loop().time() - began
        assert 0 < served <= serving.REQUESTS_AT_ONCE + serving.REQUESTS_PER_S * (took + 1.0)
        writer.transport.abort()


async def test_connections_of_one_source_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle connection of a source goes for a new one."""
    monkeypatch.setattr(streams, "MOST_OF_SOURCE", 3)
    monkeypatch.setattr(shares, "is_private", lambda host: False)
    async with nodes(monkeypatch) as made:
        node = await made.start()
        opened = []
        for _ in range(5):
            reader, writer = await connect(node.port)
            writer.write(streams.head(0))
            async with asyncio.timeout(DEADLINE_S):
                await reader.readexactly(16)
            opened.append((reader, writer))
        async with asyncio.timeout(DEADLINE_S):
            for reader, _ in opened[:2]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        table = node.node.rpc.carrier.streams
        assert table is not None
        assert len(table._accepted) == 3
        for _, writer in opened:
            writer.close()


async def test_an_unproven_address_gets_one_packet() -> None:
    """Who has shown nothing is dialled only when what came about it pays for the packet."""
    clock = asyncio.get_running_loop().time
    dialled: list[tuple[str, int]] = []

    async def dial(host: str, port: int) -> socket.socket:
        dialled.append((host, port))
        raise OSError("nobody")

    ledger = AddressLedger(clock)
    sends = Carrier(ledger, clock)
    sends.streams = streams.Streams(lambda *args: None, 0, dial)
    victim = ("203.0.113.1", 80)
    assert not sends._send_by_tcp(b"x", victim)
    ledger.told(victim, streams.SYN_BYTES / 3 + 1)
    assert sends._send_by_tcp(b"x", victim)
    await until(lambda: dialled == [victim])
    await until(lambda: not sends.streams._dialling)  # type: ignore[union-attr]
    assert not sends._send_by_tcp(b"x", victim)
    sends.close()


async def test_what_may_go_to_a_stranger_does_for_the_way_that_gets_through() -> None:
    """A node that UDP has answered nothing yet opens a connection first, of what may go to a stranger; one
    that UDP answered keeps back what opens a connection when it pads its datagrams.
    """
    clock = asyncio.get_running_loop().time
    dialled: list[tuple[str, int]] = []

    async def dial(host: str, port: int) -> socket.socket:
        dialled.append((host, port))
        raise OSError("nobody")

    class Udp(asyncio.DatagramTransport):
        def get_extra_info(self, name: str, default: object = None) -> tuple[str, int]:
            return "0.0.0.0", 1

        def is_closing(self) -> bool:
            return False

        def sendto(self, data: object, addr: object = None) -> None: ...

        def close(self) -> None: ...

    ledger = AddressLedger(clock)
    sends = Carrier(ledger, clock)
    sends.opened(Udp())
    sends.streams = streams.Streams(lambda *args: None, 0, dial)
    stranger = ("203.0.113.1", 80)
    ledger.told(stranger, 131 / 3 + 1)
    room = ledger.room(stranger)
    assert sends.room(stranger) == room - streams.SYN_BYTES
    by_udp, _ = sends.ask(b"x" * 83, stranger, 0, b"transact")
    assert not by_udp
    await until(lambda: dialled == [stranger])
    assert ledger.room(stranger) == room - streams.SYN_BYTES
    sends.close()


# -- decisions


def test_ways() -> None:
    """UDP first; TCP for who missed it; both now and then; deaf after two misses, or the first one of all."""
    now = 0.0
    ways = Ways(lambda: now)
    here, there = ("192.0.2.1", 1), ("192.0.2.2", 2)
    assert ways.to_ask(here, 0) == BOTH  # nothing is known
    ways.by_udp(here)
    assert [ways.to_ask(here, attempt) for attempt in range(4)] == [UDP, UDP, BOTH, BOTH]
    assert [ways.to_ask(there, attempt) for attempt in range(2)] == [UDP, BOTH]
    ways.missed(there)
    assert not ways.deaf
    assert (ways.to_ask(there, 0), ways.to_tell(there), ways.to_tell(here)) == (TCP, TCP, UDP)
    now += FIRST_AGAIN_SECONDS
    assert (ways.to_ask(there, 0), ways.to_ask(there, 0)) == (BOTH, TCP)
    ways.missed(here)
    assert ways.deaf
    assert ways.to_tell(("192.0.2.3", 3)) == TCP
    ways.by_udp(there)
    assert not ways.deaf
    assert ways.to_tell(there) == UDP
    fresh = Ways(lambda: now)
    fresh.missed(here)
    assert fresh.deaf


async def test_a_peers_port_takes_connections_of_the_table() -> None:
    """Who reaches a peer over TCP alone gets the table's first bytes back, though it sends nothing else."""
    async with Peer("tcp", listen="127.0.0.1:0") as peer:
        async with asyncio.timeout(30):
            reader, writer = await connect(int(peer.address.rpartition(":")[2]))
            writer.write(streams.head(0))
            assert streams.parse_head(await reader.readexactly(streams.HEAD_BYTES)) is not None
            writer.close()
