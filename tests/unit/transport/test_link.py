"""Endpoints and links: who gets connected, who is refused, and what survives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
import zlib

import pytest

from p2pavg.errors import (
    AddressInUseError,
    ConfigurationError,
    IncompatiblePeerError,
    ProtocolError,
    UnreachableError,
)
from p2pavg.identity import Identity
from p2pavg.transport.links import control, half_open, handshake, listening, pairing, proofs
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.streams import keeper as stream_keeper
from p2pavg.transport.paths import Paths
from tests.unit.transport.endpoints import DEADLINE_S, Host
from tests.unit.transport.engine_swarm import KINDS, poll

PARTY = handshake.Party.of("run", closed=False)


@pytest.fixture
def kinds():
    """Which engine the hosts have, in turn."""
    return ("python",)


@pytest.fixture
async def hosts(kinds):
    """A function that starts a host; all are closed afterwards."""
    started: list[Host] = []

    async def start(
        identity: Identity | None = None, *, run_id="run", port=0, default=False, streams=2, **hello
    ):
        host = await Host(identity, kind=kinds[len(started) % len(kinds)], **hello).start(
            run_id=run_id, port=port, port_is_default=default, streams=streams
        )
        started.append(host)
        return host

    yield start
    for host in started:
        await host.close()


async def raw_connection(host: Host) -> socket.socket:
    return await wire.dial("127.0.0.1", host.endpoint.port, socket.socket)


async def closed_by_other(sock: socket.socket) -> bytes:
    """What the other side still says before it closes."""
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        try:
            while got := await asyncio.get_running_loop().sock_recv(sock, 65536):
                data += got
        except ConnectionResetError:
            pass
    sock.close()
    return data


class TestConnecting:
    async def test_link(self, hosts):
        """A dial links both sides, tells each what the other said, and opens the streams."""
        a, b = await hosts(role="a", schema=b"s" * 32), await hosts(role="b", schema=b"s" * 32)
        link = await a.connect(b)
        await b.until(lambda: b.up)
        assert link is a.link_to(b)
        assert link.hello["role"] == "b"
        assert b.link_to(a).hello["role"] == "a"
        assert b.link_to(a).address == ("127.0.0.1", a.endpoint.port)
        assert (link.peer_id, b.link_to(a).peer_id) == (b.id, a.id)
        await link.ready
        await b.link_to(a).ready
        await poll(lambda: len(a.engine.streams(link.id)) == 2)
        await poll(lambda: sorted(b.engine.streams(b.link_to(a).id)) == sorted(a.engine.streams(link.id)))
        assert 0 < link.rtt_min <= link.rtt < DEADLINE_S

    async def test_connect_is_idempotent(self, hosts):
        """Dialling a peer again, at once or later, gives the same link."""
        a, b = await hosts(), await hosts()
        links = await asyncio.gather(*(a.connect(b) for _ in range(5)))
        links.append(await a.connect(b))
        links.append(await a.connect(b, expect=b.id))
        links.append(await a.endpoint.connect("localhost", b.endpoint.port, timeout=DEADLINE_S))
        assert len(set(map(id, links))) == 1
        await b.until(lambda: b.up)
        assert len(a.up) == len(b.up) == 1
        back = await b.connect(a)
        assert back is b.link_to(a)
        assert a.down == b.down == []

    @pytest.mark.parametrize("seed", range(10))
    async def test_simultaneous_dials(self, hosts, seed):
        """Peers that all dial each other at once end with one link per pair, and lose none on the way."""
        rng = random.Random(seed)
        swarm = [await hosts() for _ in range(4)]

        async def dial(one: Host, other: Host) -> None:
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            expect = other.id if rng.random() < 0.5 else None
            assert await one.connect(other, expect=expect) is one.link_to(other)

        pairs = [(one, other) for one in swarm for other in swarm if one is not other]
        rng.shuffle(pairs)
        await asyncio.gather(*(dial(*pair) for pair in pairs))
        for host in swarm:
            await host.until(lambda host=host: len(host.endpoint.links) == 3)
            assert len(host.up) == 3
            assert host.down == []
        for one, other in pairs:
            assert one.link_to(other).secret == other.link_to(one).secret
            await one.link_to(other).ready

    async def test_redial_after_loss(self, hosts):
        """A peer that lost its end of the link and dials again replaces the other's stale end."""
        for _ in range(2):  # which of the two has the smaller id is chance
            a, b = await hosts(), await hosts()
            first = await a.connect(b)
            await b.until(lambda b=b: b.up)
            stale = b.link_to(a)
            first._connection.close = lambda: None  # the loss reaches only one side
            first.close("lost")
            second = await a.connect(b)
            await b.until(lambda b=b: len(b.up) == 2)
            assert second is not first
            assert [link for link, _ in b.down] == [stale]
            assert b.link_to(a).secret == second.secret

    async def test_a_dial_that_has_proved_itself_is_given_time(self, hosts, monkeypatch):
        """A dial replaces a silent link, and its time is over before the other side answers its proof, which
        has given up that link, too: a dial that ended there would leave both without a link.
        """
        a, b = await hosts(), await hosts()
        await a.connect(b)
        monkeypatch.setattr(pairing, "_QUIET_S", -1.0)
        admit, proved, goes_on = b.endpoint.pairing.as_listener, asyncio.Event(), asyncio.Event()

        async def slowly(theirs, accepted_at):
            proved.set()
            await goes_on.wait()
            await admit(theirs, accepted_at)

        monkeypatch.setattr(b.endpoint.pairing, "as_listener", slowly)
        dial = asyncio.ensure_future(a.connect(b, anew=True, timeout=0.5))
        async with asyncio.timeout(DEADLINE_S):
            await proved.wait()
            await asyncio.wait((dial,), timeout=0.6)
            assert not dial.done()
            goes_on.set()
            link = await dial
        await b.until(lambda: len(b.up) == 2)
        assert a.link_to(b) is link
        assert b.link_to(a).secret == link.secret

    async def test_a_link_that_takes_nothing_away_is_replaced(self, hosts, monkeypatch):
        """The other side is heard, and nothing that is sent to it arrives: to the kernel's next try it may be
        many seconds. Whoever finds that the link is silent gets another one.
        """
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        await b.until(lambda: b.up)
        assert await a.connect(b, anew=True) is link
        monkeypatch.setattr(control.tcp_info, "queued_bytes", lambda sock: 100)
        monkeypatch.setattr(control.tcp_info, "acked_bytes", lambda sock: 7)
        assert link.quiet_s < 1.0  # more is acknowledged than when it was last looked at
        link._connection._moved_at -= 5.0
        b.link_to(a).send({"t": "word"})
        await a.until(lambda: a.messages)
        assert link.stuck_s >= 5.0
        assert await a.connect(b, anew=True) is not link
        assert [(gone, why) for gone, why in a.down] == [(link, "it was silent, and a new connection is not")]

    async def test_link_down(self, hosts):
        """When a peer closes, the other is told once, requests fail, and the streams are gone."""
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        pending = asyncio.ensure_future(link.request({"t": "never answered"}, DEADLINE_S))
        await b.until(lambda: b.messages)
        await b.close()
        await a.until(lambda: a.down)
        with pytest.raises(UnreachableError):
            await pending
        assert len(a.down) == 1
        assert a.endpoint.links == {}
        assert list(a.engine.streams(link.id)) == []
        link.send({"t": "into the void"})
        with pytest.raises(UnreachableError):
            await link.request({"t": "x"}, 1.0)

    async def test_the_path_of_a_link_that_ended_is_remembered(self, hosts, tmp_path):
        """Peers of a run end one after the other: who is last knows the paths to all."""
        a, b = await hosts(), await hosts()
        a.endpoint._paths = Paths(tmp_path / "paths.json")
        link = await a.connect(b)
        link.rtt_min, link.brings_bps, link.address = 0.1, 5e7, ("192.0.2.1", link.address[1])
        await b.close()
        await a.until(lambda: a.down)
        a.endpoint.remember()
        found = Paths(tmp_path / "paths.json").known(link.local_host, link.address[0], 0.1)
        assert found is not None
        assert found.brings_bps == 5e7

    async def test_nobody_there(self, hosts):
        """A closed port, a port that is no peer, and one that never answers are UnreachableError."""
        a = await hosts()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(UnreachableError, match="did not answer"):
                await a.endpoint.connect("127.0.0.1", port, timeout=0.2)
        with pytest.raises(UnreachableError, match="nobody answers"):
            await a.endpoint.connect("127.0.0.1", port, timeout=DEADLINE_S)
        with pytest.raises(UnreachableError):
            await a.endpoint.connect("no-such-host.invalid", 1, timeout=DEADLINE_S)

        async def http(reader, writer):
            await reader.read(16)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UnreachableError, match="not a p2pavg peer"):
                await a.endpoint.connect("127.0.0.1", port, timeout=DEADLINE_S)

    async def test_ports(self, hosts, caplog):
        """A taken port is an error, unless it is only the default: then the next one is used and named."""
        a = await hosts()
        with pytest.raises(AddressInUseError, match=str(a.endpoint.port)):
            await hosts(port=a.endpoint.port)
        with caplog.at_level(logging.INFO, "p2pavg.transport"):
            b = await hosts(port=a.endpoint.port, default=True)
        assert b.endpoint.port > a.endpoint.port
        assert str(b.endpoint.port) in caplog.text
        with pytest.raises(ConfigurationError):
            listening.bind("192.0.2.1", 0, port_is_default=False)


class TestRefusing:
    async def test_other_run(self, hosts):
        """A peer of another run is refused on both sides, in words."""
        a, b = await hosts(run_id="one"), await hosts(run_id="two")
        with pytest.raises(IncompatiblePeerError, match="another run"):
            await a.connect(b)
        assert a.up == b.up == []

    async def test_other_model(self, hosts):
        """Another schema is refused, naming what differs; a peer without a schema fits all."""
        a = await hosts(schema=b"a" * 32, terms={"parameters": 10})
        b = await hosts(schema=b"b" * 32, terms={"parameters": 20})
        watcher = await hosts(schema=b"")
        with pytest.raises(
            IncompatiblePeerError, match=r"parameters is (10|20) at peer .{8} and (10|20) at peer .{8}"
        ):
            await a.connect(b)
        await watcher.connect(a)
        await watcher.connect(b)

    async def test_other_terms(self, hosts):
        """Equal models with different terms are refused, naming the term."""
        a = await hosts(schema=b"a" * 32, terms={"target_batch_size": 64, "compression": "fp16"})
        b = await hosts(schema=b"a" * 32, terms={"target_batch_size": 32, "compression": "fp16"})
        with pytest.raises(
            IncompatiblePeerError,
            match=r"disagree: target_batch_size is (32|64) at peer .{8} and (32|64) at peer .{8};",
        ):
            await a.connect(b)

    async def test_self(self, hosts):
        """Dialling oneself is a ConfigurationError."""
        a = await hosts()
        with pytest.raises(ConfigurationError, match="own"):
            await a.connect(a)
        assert a.up == []

    async def test_unexpected_peer(self, hosts):
        """An address where somebody else lives now is unreachable, and makes no link."""
        a, b = await hosts(), await hosts()
        with pytest.raises(UnreachableError, match="no longer at that address"):
            await a.connect(b, expect=os.urandom(20))
        await asyncio.sleep(0)
        assert a.up == b.up == []

    async def test_other_wire_version(self, hosts, monkeypatch):
        """Another wire version is refused with both versions named."""
        a, b = await hosts(), await hosts()
        real = handshake.preamble

        def changed(*about, **more):
            raw = real(*about, **more)[:16]
            return handshake._checked(raw[:6] + b"\x09\x00" + raw[8:])

        monkeypatch.setattr(handshake, "preamble", changed)
        with pytest.raises(IncompatiblePeerError, match=r"version 9\.0, this one .* version 2\.0;"):
            await a.connect(b)

    @pytest.mark.parametrize("byte", [6, 8, 9, 10, 15, 19])
    async def test_a_damaged_preamble_is_no_verdict(self, hosts, monkeypatch, byte):
        """A bit flips in the version, the run or elsewhere in a connection's first bytes: the dial fails as
        over a bad path, and nobody takes the other for one of another run, to which it would not come back.
        """
        a, b = await hosts(), await hosts()
        real = handshake.preamble
        monkeypatch.setattr(handshake, "preamble", lambda *about: flipped(real(*about), 8 * byte + 1))
        with pytest.raises((ProtocolError, UnreachableError)):
            await a.connect(b)
        monkeypatch.setattr(handshake, "preamble", real)
        assert await a.connect(b)

    async def test_stolen_identity(self, hosts):
        """Claiming another's key without having it does not make a link."""
        victim = await hosts()
        b = await hosts()
        thief = Identity.generate()
        thief.public_key, thief.peer_id = victim.identity.public_key, victim.identity.peer_id
        a = await hosts(thief)
        with pytest.raises(ProtocolError, match="prove"):
            await a.connect(b)
        with pytest.raises(ProtocolError, match="prove"):
            await b.connect(a)
        assert b.up == []

    async def test_duplicate_identity(self, hosts):
        """A second live process with the same identity is refused; the first keeps its link."""
        identity = Identity.generate()
        b, first, second = await hosts(), await hosts(identity), await hosts(identity)
        await first.connect(b)
        with pytest.raises(ConfigurationError, match="another live process"):
            await second.connect(b)
        with pytest.raises(ConfigurationError, match="another live process"):
            await b.connect(second)
        with pytest.raises(ConfigurationError, match="another process"):
            await first.connect(second)
        assert b.down == []

    async def test_restarted_process(self, hosts, monkeypatch):
        """A restarted process takes its identity over when the old one no longer answers."""
        monkeypatch.setattr("p2pavg.transport.links.pairing._ALIVE_S", 0.1)
        identity = Identity.generate()
        b, first, second = await hosts(), await hosts(identity), await hosts(identity)
        old = await first.connect(b)
        await b.until(lambda: b.up)
        old._connection.write = lambda message: True  # it hangs
        await second.connect(b)
        await b.until(lambda: len(b.up) == 2)
        assert b.down[0][1] == "its process has restarted"


def flipped(data: bytes, bit: int) -> bytes:
    """With one bit inverted."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


class TestHostileBytes:
    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
            os.urandom(64),
            handshake.preamble(7, PARTY),
            handshake.preamble(handshake.CONTROL, PARTY) + handshake.make_head(2**32 - 1, 0),
            handshake.preamble(handshake.CONTROL, PARTY) + handshake.pack({"peer": 1}),
            handshake.preamble(handshake.CONTROL, PARTY)
            + handshake.make_head(3, zlib.crc32(b"abc"))
            + b"abc",
            handshake.preamble(handshake.CONTROL, PARTY) + handshake.make_head(3, 0) + b"\x81\xa1a",
            handshake.preamble(handshake.DATA, PARTY) + handshake.pack({"link": b"12345678", "stream": 0}),
            handshake.preamble(handshake.DATA, PARTY) + handshake.pack({"link": [1], "stream": "x"}),
            handshake.preamble(handshake.DATA, PARTY) + handshake.make_head(4097, 0) + bytes(4097),
        ],
        ids=[
            "http",
            "random",
            "kind",
            "huge",
            "no hello",
            "no msgpack",
            "corrupted",
            "no link",
            "odd",
            "long",
        ],
    )
    async def test_is_cut(self, hosts, data, caplog):
        """Connections that do not begin as one of ours are closed, and disturb nobody: not by the log either,
        which says so at debug level alone.
        """
        caplog.set_level(logging.DEBUG, "p2pavg")
        a, b = await hosts(), await hosts()
        sock = await raw_connection(a)
        await wire.send(sock, data)
        await closed_by_other(sock)
        said = [record for record in caplog.records if record.name.startswith("p2pavg")]
        assert said
        assert {record.levelno for record in said} == {logging.DEBUG}
        await b.connect(a)
        assert len(a.up) <= 1

    async def test_silence_is_cut(self, hosts, monkeypatch):
        """A connection that says nothing is closed at the handshake's deadline."""
        monkeypatch.setattr(wire, "HANDSHAKE_S", 0.1)
        a = await hosts()
        assert await closed_by_other(await raw_connection(a)) == b""

    async def test_half_open_is_bounded(self, hosts):
        """Beyond a source's bound its oldest silent connection is cut, so newcomers still get in."""
        a, b = await hosts(), await hosts()
        held = [await raw_connection(a) for _ in range(half_open.MOST_SILENT + 1)]
        await b.connect(a)
        assert await closed_by_other(held[0]) == b""
        for sock in held[1:]:
            sock.close()

    async def test_those_that_spoke_are_bounded(self, hosts, monkeypatch):
        """Beyond the bound on all together the oldest that began a handshake and stopped is cut."""
        monkeypatch.setattr(half_open, "MOST", 4)
        a, b = await hosts(), await hosts()
        held = [await raw_connection(a) for _ in range(5)]
        for sock in held:
            await wire.send(sock, handshake.preamble(handshake.CONTROL, PARTY)[:4])
        assert await closed_by_other(held[0]) == b""
        await b.connect(a)
        for sock in held[1:]:
            sock.close()

    async def test_stream_without_secret(self, hosts):
        """A data stream that knows a link's tag but not its secret is cut."""
        a, b = await hosts(), await hosts()
        link = await b.connect(a)
        await link.ready
        hello = proofs.stream_hello(link.secret, 99)
        sock = await raw_connection(a)
        await wire.send(
            sock, handshake.preamble(handshake.DATA, PARTY) + handshake.pack({**hello, "stream": 98})
        )
        await closed_by_other(sock)
        assert not {98, 99} & set(a.engine.streams(a.link_to(b).id))

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (handshake.make_head(4, zlib.crc32(b"\xc1" * 4)) + b"\xc1" * 4, "a message that is not msgpack"),
            (handshake.make_head((1 << 20) + 1, 0), "a message of 1048577 bytes, more than 1048576"),
            (flipped(handshake.pack({"t": "odd"}), 8 * 3), "the head of a message was corrupted on its way"),
            (flipped(handshake.pack({"t": "odd"}), -1), "a message was corrupted on its way"),
        ],
        ids=["garbage", "more than a MiB", "a bit of the length", "a bit of the body"],
    )
    async def test_control_garbage_closes_the_link(self, hosts, data, why):
        """A control message that is no message closes its link with a reason, and no other."""
        a, b, c = await hosts(), await hosts(), await hosts()
        link = await a.connect(b)
        await c.connect(b)
        link._connection._transport.write(data)
        await b.until(lambda: b.down)
        assert b.down[0][1] == why
        assert list(b.endpoint.links) == [c.id]

    async def test_protocol_error_of_the_user(self, hosts):
        """A message that the floors above refuse with ProtocolError closes the link."""
        a, b = await hosts(), await hosts()

        def refuse(link, message):
            raise ProtocolError("such a message is not sent")

        b.on_message = refuse
        link = await a.connect(b)
        link.send({"t": "odd"})
        await b.until(lambda: b.down)
        assert b.down[0][1] == "such a message is not sent"

    async def test_full_queue_closes_the_link(self, hosts):
        """A peer that reads nothing is dropped when its queue is full; memory stays bounded."""
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        await b.until(lambda: b.up)
        b.link_to(a)._connection._transport.pause_reading()
        for _ in range(200):
            link.send({"t": "big", "data": bytes(500_000)})
        await a.until(lambda: a.down)
        assert a.down[0][1] == "it does not take what is sent to it"

    async def test_who_sends_to_all_may_find_one_gone(self, hosts):
        """A message to every link, of which one has just broken: none goes out of the mapping meanwhile."""
        a, b, c = await hosts(), await hosts(), await hosts()
        broken = await a.connect(b)
        await a.connect(c)
        await c.until(lambda: c.up)
        broken._connection._transport.abort()  # as a reset does, before anybody is told
        for link in a.endpoint.links.values():
            link.send({"t": "x"})
        assert len(a.endpoint.links) == 2
        await a.until(lambda: a.down)
        await c.until(lambda: c.messages)
        assert list(a.endpoint.links) == [c.identity.peer_id]

    async def test_too_long_message(self, hosts):
        """A control message over 1 MiB is the caller's ValueError."""
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        with pytest.raises(ValueError):
            link.send({"data": bytes(1 << 20)})
        link.send({"t": "x", "data": bytes((1 << 20) - 100)})
        await b.until(lambda: b.messages)


class TestMessages:
    async def test_order(self, hosts):
        """Messages arrive once, in order, right from the first one sent in link_up."""
        a, b = await hosts(), await hosts()
        a.link_up = lambda link: [link.send({"t": "n", "i": i, "pad": bytes(3000)}) for i in range(500)]
        await a.connect(b)
        await b.until(lambda: len(b.messages) == 500)
        assert [message["i"] for _, message in b.messages] == list(range(500))

    async def test_request(self, hosts):
        """A request gets its own reply, whatever the order; a late reply is dropped."""
        a, b = await hosts(), await hosts()
        kept = []

        def answer(link, message):
            kept.append(message)
            if len(kept) == 3:
                for asked in reversed(kept):
                    link.reply(asked, {"echo": asked["i"]})

        b.on_message = answer
        link = await a.connect(b)
        with pytest.raises(TimeoutError):
            await link.request({"t": "ask", "i": 0}, 0.01)
        answers = await asyncio.gather(*(link.request({"t": "ask", "i": i}, DEADLINE_S) for i in (1, 2)))
        assert answers == [{"echo": 1}, {"echo": 2}]
        assert a.messages == []

    async def test_rtt(self, hosts, monkeypatch):
        """Pings keep the round-trip time and the time last heard up to date."""
        monkeypatch.setattr("p2pavg.transport.links.upkeep.PING_INTERVAL_S", 0.01)
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        link._rtt = link.rtt_min = 5.0
        before = time.monotonic()
        await poll(lambda: link.rtt_min < 1.0 and link.rtt < 2.0)
        await poll(lambda: link.last_heard > before)


class TestStreams:
    @pytest.fixture(params=KINDS, ids="+".join)
    def kinds(self, request):
        return request.param

    async def test_set_streams(self, hosts):
        """Either side can ask for more streams; the larger wish counts; idle surplus is closed."""
        a, b = await hosts(streams=1), await hosts(streams=1)
        link = await a.connect(b)
        await b.until(lambda: b.up)
        back = b.link_to(a)
        a.endpoint.set_streams(link, 3)
        await poll(lambda: len(a.engine.streams(link.id)) == len(b.engine.streams(back.id)) == 3)
        b.endpoint.set_streams(back, 5)
        await poll(lambda: len(a.engine.streams(link.id)) == len(b.engine.streams(back.id)) == 5)
        b.endpoint.set_streams(back, 1)
        a.endpoint.set_streams(link, 2)
        await poll(lambda: len(a.engine.streams(link.id)) == len(b.engine.streams(back.id)) == 2)

    async def test_streams_are_opened_soon_again_while_the_control_connection_works(self, hosts):
        """Pauses between attempts grow only while nothing is heard; an attempt is broken off early twice of
        three times, since kernels pause longer than most cuts last.
        """
        a, b = await hosts(streams=1), await hosts(streams=1)
        link = await a.connect(b)
        await poll(lambda: len(a.engine.streams(link.id)) == 1)
        keeper = a.endpoint._keepers[link.id]
        keeper._failures = 20
        assert keeper._pause() <= stream_keeper._SOON_S
        patience = []
        for failures in range(6):
            keeper._failures = failures
            patience.append(keeper._patience())
        assert patience[2] == patience[5] == wire.HANDSHAKE_S > 3 * max(patience[0], patience[1], patience[3])

    async def test_no_stream_is_closed_that_may_bring_a_blob(self, hosts, monkeypatch):
        """While a blob is open here, chunks may be on their way on any stream: a surplus one waits."""
        a, b = await hosts(streams=3), await hosts(streams=3)
        link = await a.connect(b)
        await poll(lambda: len(a.engine.streams(link.id)) == 3)
        monkeypatch.setattr(stream_keeper, "_QUIET_S", -1.0)
        keeper = a.endpoint._keepers[link.id]
        a.engine.open_blob(7, memoryview(bytearray(64)), 64)
        assert keeper._close_quiet(2)
        assert len(a.engine.streams(link.id)) == 3
        a.engine.cancel(7)

        def closed():
            keeper._close_quiet(len(a.engine.streams(link.id)) - 1)
            return len(a.engine.streams(link.id)) == 1

        await poll(closed)

    async def test_everything_that_leaves_is_counted(self, hosts):
        """What the kernel sent to a peer is counted to that peer: control connection and streams, whole and
        once, also when a stream or the link is gone.
        """
        a, b = await hosts(streams=2), await hosts(streams=2)
        link = await a.connect(b)
        await poll(lambda: len(a.engine.streams(link.id)) == len(b.engine.streams(b.link_to(a).id)) == 2)
        counted = lambda: a.endpoint.carried()[b.id]  # noqa: E731
        opened = counted()
        assert opened.sent > 1000
        chunk_bytes, data = 1_000_000, os.urandom(3_000_000)  # which no packing makes fewer
        buffer = bytearray(len(data))
        b.engine.open_blob(5, memoryview(buffer), chunk_bytes)
        for chunk in range(3):
            view = memoryview(data)[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
            a.engine.send_blob(link.id, 5, chunk, view)
        await poll(lambda: bytes(buffer) == data)
        sent = counted()
        again = lambda: sum(row.retransmits for row in a.engine.stats(link.id))  # noqa: E731
        assert 3_000_000 < sent.sent - opened.sent < 3_300_000 + again() * 65_536
        lost = lambda: counted().sent - b.endpoint.carried()[a.id].received  # noqa: E731
        await poll(lambda: 0 <= lost() < 3000 or (again() and lost() > 0))
        await poll(lambda: not any(row.unacked_bytes for row in a.engine.stats(link.id)))
        sent = counted()  # nothing is sent once more from here on
        old = set(a.engine.streams(link.id))
        a.endpoint._replace_stream(link, min(old))
        await poll(lambda: set(b.engine.streams(b.link_to(a).id)) - old)
        replaced = counted()
        assert 0 < replaced.sent - sent.sent < 10_000
        link.close("over")
        await poll(lambda: b.down)
        assert 0 <= counted().sent - replaced.sent < 10_000

    async def test_strangers_are_counted(self, hosts):
        """Bytes to whoever never proved who it is are counted, to nobody."""
        a = await hosts()
        sock = await raw_connection(a)
        try:
            await poll(lambda: None in a.endpoint.carried())
            before = a.endpoint.carried()[None]
        finally:
            sock.close()
        await poll(lambda: a.endpoint.carried()[None].received > before.received)

    @pytest.mark.parametrize("dialler_loses", [True, False])
    async def test_lost_stream_is_reopened(self, hosts, dialler_loses):
        """A stream that breaks, at whichever side, is opened again under a new number."""
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        await poll(lambda: len(a.engine.streams(link.id)) == 2)
        old = set(a.engine.streams(link.id))
        if dialler_loses:
            a.engine.detach(link.id, min(old))
            a.endpoint.stream_closed(link.id, min(old), "lost")
        else:
            await poll(lambda: len(b.engine.streams(b.link_to(a).id)) == 2)
            b.engine.detach(b.link_to(a).id, min(old))
        await poll(lambda: len(set(a.engine.streams(link.id)) - old) == 1)
        await poll(lambda: sorted(b.engine.streams(b.link_to(a).id)) == sorted(a.engine.streams(link.id)))
        assert a.down == b.down == []

    async def test_close_leaves_nothing(self, hosts):
        """Closing endpoints and engines frees every socket."""
        before = _tcp_sockets()
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        await link.ready
        await a.close()
        await b.close()
        await poll(lambda: _tcp_sockets() <= before)

    async def test_fork_closes_sockets(self, hosts):
        """A forked child keeps none of our sockets, and the parent's links go on."""
        others = _tcp_sockets()  # of whatever else ran in this process
        a, b = await hosts(), await hosts()
        link = await a.connect(b)
        await link.ready
        await poll(lambda: len(a.engine.streams(link.id)) == 2)
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(into, str(_tcp_sockets()).encode())
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert int(os.read(out, 100)) <= others
        os.close(out)
        os.close(into)
        link.send({"t": "still here"})
        await b.until(lambda: b.messages)
        assert len(a.engine.streams(link.id)) == 2


def _tcp_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    count += sock.family in (socket.AF_INET, socket.AF_INET6)
    return count
