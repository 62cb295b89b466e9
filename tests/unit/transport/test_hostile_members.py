"""What a member with valid credentials cannot do to the others: attacks, with and without the check."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from p2pavg.credentials import Authority
from p2pavg.errors import P2PAvgError, ProtocolError, StateError, UnreachableError
from p2pavg.identity import Identity, short_id
from p2pavg.rounds.loop import hello
from p2pavg.rounds.state import downloader
from p2pavg.rounds.state import manifest as state
from p2pavg.transport.links import budget, control, handshake, link, proofs
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.budget import Budget
from p2pavg.transport.links.streams import keeper
from tests.unit.transport.endpoints import DEADLINE_S, Host

RUN = "run"


@contextlib.asynccontextmanager
async def members(count: int, **options: object) -> AsyncIterator[list[Host]]:
    """Of a closed run."""
    authority, made = Authority.new(RUN), []
    for _ in range(count):
        credentials = authority.member()
        made.append(
            await Host(credentials.identity).start(
                run_id=RUN, credentials=credentials, **{"streams": 0, **options}
            )
        )
    try:
        yield made
    finally:
        for host in made:
            await host.close()


@contextlib.asynccontextmanager
async def pair(**options: object) -> AsyncIterator[tuple[Host, Host]]:
    """The attacker, and its victim."""
    async with members(2, **options) as (attacker, victim):
        yield attacker, victim


@pytest.mark.parametrize("checked", [False, True])
async def test_a_flood_of_messages(
    checked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a flood, the budget's messages are read; the rest waits on its sender's side, nobody else does."""
    monkeypatch.setattr(budget, "MESSAGES_AT_ONCE", 100.0)
    monkeypatch.setattr(budget, "MESSAGES_PER_S", 0.01)
    if not checked:
        monkeypatch.setattr(Budget, "pause_s", lambda *_: 0.0)
    async with members(3) as (attacker, bystander, victim):
        to_victim = await attacker.connect(victim)
        honest = await bystander.connect(victim)
        flood, data = 8000, handshake.pack({"t": "progress", "x": bytes(1000)})
        assert to_victim._connection._transport is not None
        to_victim._connection._transport.write(data * flood)
        if not checked:
            await victim.until(lambda: len(victim.messages) == flood)
            return
        await victim.until(lambda: len(victim.messages) >= 90)
        assert await honest.alive(DEADLINE_S)
        assert len(victim.messages) < 110
        held = victim.link_to(attacker)._connection
        assert len(held._buffer) <= control.MAX_MESSAGE_BYTES
        assert not victim.down
        assert f"peer {short_id(attacker.id)} sends far more messages" in caplog.text
        assert short_id(bystander.id) not in caplog.text


async def test_a_burst_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends more than its budget at once, as an honest peer may, loses neither link nor message."""
    monkeypatch.setattr(budget, "MESSAGES_AT_ONCE", 10.0)
    monkeypatch.setattr(budget, "MESSAGES_PER_S", 2000.0)
    async with members(2) as (sender, receiver):
        link = await sender.connect(receiver)
        for number in range(500):
            link.send({"t": "progress", "n": number})
        await receiver.until(lambda: len(receiver.messages) == 500)
        assert [message["n"] for _, message in receiver.messages] == list(range(500))
        assert await link.alive(DEADLINE_S)
        assert not receiver.down


def test_the_budget_is_above_all_that_the_protocol_needs() -> None:
    """Ten seconds of thrice what the fastest rounds need wait for nothing; long ones count more."""
    made, peer = Budget(), b"p" * 20
    assert not any(made.pause_s(peer, 300, n / 4000) for n in range(40_000))
    pauses = [made.pause_s(peer, 300, 10.0) for _ in range(30_000)]
    assert pauses[-1] == pytest.approx(10_000 / budget.MESSAGES_PER_S, rel=0.01)
    assert not made.pause_s(b"q" * 20, 300, 10.0)
    assert sum(made.pause_s(b"l" * 20, 1 << 20, 0.0) == 0 for _ in range(100)) == 19
    assert sum(made.admits_stream(b"s" * 20, 0.0) for _ in range(1000)) == budget.STREAMS_AT_ONCE
    assert sum(made.admits_handshake("192.0.2.1", 0.0) for _ in range(1000)) == budget.HANDSHAKES_AT_ONCE
    assert made.admits_handshake("192.0.2.2", 0.0)


@pytest.mark.parametrize("checked", [False, True])
async def test_handshakes_without_end(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the handshakes that one source begins, those beyond its budget are cut, and links go on."""
    monkeypatch.setattr(budget, "HANDSHAKES_AT_ONCE", 3.0)
    monkeypatch.setattr(budget, "HANDSHAKES_PER_S", 0.01)
    if not checked:
        monkeypatch.setattr(Budget, "admits_handshake", lambda *_: True)
    async with pair() as (attacker, victim):
        to_victim = await attacker.connect(victim)
        answered = 0
        for _ in range(6):
            sock = await wire.dial("127.0.0.1", victim.endpoint.port, socket.socket)
            with sock, contextlib.suppress(UnreachableError, OSError):
                await wire.send(sock, handshake.preamble(handshake.CONTROL, to_victim.party))
                await wire.receive(sock, handshake.PREAMBLE_BYTES)
                answered += 1
        assert answered == (2 if checked else 6)
        assert not victim.down


async def test_data_streams_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many streams of a link are open at a time, and no more."""
    monkeypatch.setattr(keeper, "MOST_ACCEPTED", 3)
    async with pair() as (attacker, victim):
        to_victim = await attacker.connect(victim)
        await victim.until(lambda: victim.up)
        with contextlib.ExitStack() as held:
            for number in range(6):
                sock = held.enter_context(await wire.dial("127.0.0.1", victim.endpoint.port, socket.socket))
                hello = handshake.pack(proofs.stream_hello(to_victim.secret, number))
                await wire.send(sock, handshake.preamble(handshake.DATA, to_victim.party) + hello)
                await wire.receive(sock, handshake.PREAMBLE_BYTES)
                await wire.receive_message(sock)
            async with asyncio.timeout(DEADLINE_S):  # the last one was cut
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            assert set(victim.engine.streams(victim.up[0].id)) == {0, 1, 2}
        assert not victim.down


@pytest.mark.parametrize("checked", [False, True])
async def test_data_streams_without_end(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are opened and closed over and over are refused beyond a budget; the link stays."""
    monkeypatch.setattr(budget, "STREAMS_AT_ONCE", 5.0)
    monkeypatch.setattr(budget, "STREAMS_PER_S", 0.01)
    if not checked:
        monkeypatch.setattr(Budget, "admits_stream", lambda *_: True)
    async with pair(streams=0) as (attacker, victim):
        to_victim = await attacker.connect(victim)
        await victim.until(lambda: victim.up)
        opened = 0
        for number in range(30):
            sock = await wire.dial("127.0.0.1", victim.endpoint.port, socket.socket)
            with sock:
                hello = handshake.pack(proofs.stream_hello(to_victim.secret, number))
                party = to_victim.party
                await wire.send(sock, handshake.preamble(handshake.DATA, party) + hello)
                with contextlib.suppress(UnreachableError, OSError):
                    await wire.receive(sock, handshake.PREAMBLE_BYTES)
                    opened += 1
        assert opened == 5 if checked else opened == 30
        assert not victim.down


async def test_a_link_that_had_very_many_streams_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a link remembers against replays is bounded."""
    monkeypatch.setattr(link, "_MOST_STREAMS", 10)
    async with pair(streams=0) as (attacker, victim):
        await attacker.connect(victim)
        await victim.until(lambda: victim.up)
        for number in range(10):
            assert not victim.down
            victim.up[0].first_use(number.to_bytes(16, "big"))
        assert victim.down


@pytest.mark.parametrize("checked", [False, True])
async def test_more_than_a_hello(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says much before it has proved itself is cut; else all of it would be kept until its turn came."""
    if not checked:
        monkeypatch.setattr(control, "_MOST_UNTRUSTED_BYTES", 1 << 40)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    connection = await control.ControlConnection.over(ours, dialled=False)
    loop = asyncio.get_running_loop()
    message = handshake.pack({"x": bytes(1000)})
    sending = loop.create_task(loop.sock_sendall(theirs, message * 64))

    async def read() -> None:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(64):
                await connection.read()

    try:
        if checked:
            with pytest.raises(UnreachableError, match="more than a hello"):
                await read()
        else:
            await read()
    finally:
        sending.cancel()
        connection.close()
        theirs.close()


@pytest.mark.parametrize(
    "facts",
    [
        {"role": "trainer"},
        {"role": "trainer", "epoch": "seven", "lineage": bytes(32)},
        {"role": "trainer", "epoch": 7, "lineage": b"short"},
        {"role": "joiner", "epoch": 2**63, "lineage": bytes(32)},
        {"role": "trainer", "epoch": 7, "lineage": bytes(32), "total": "many"},
        {"role": "trainer", "epoch": 7, "lineage": bytes(32), "leader": [1]},
        {"role": "trainer", "epoch": 7, "lineage": bytes(32), "client_only": "perhaps"},
    ],
)
async def test_a_hello_that_does_not_say_where_it_stands(facts: dict[str, object]) -> None:
    """A newcomer asks the hello of every link where it stands: one that does not say gets no link."""
    with pytest.raises(ProtocolError):
        hello.vet(facts)
    for vets, refused in ((lambda facts: None, False), (hello.vet, True)):
        attacker = await Host(**facts).start(run_id=RUN)
        victim = await Host().start(run_id=RUN, vet=vets)
        try:
            if refused:
                with pytest.raises(P2PAvgError):
                    await attacker.connect(victim)
                with pytest.raises(P2PAvgError):
                    await victim.connect(attacker)
            else:
                await attacker.connect(victim)
        finally:
            await attacker.close()
            await victim.close()


async def test_a_message_that_nobody_foresaw(caplog: pytest.LogCaptureFixture) -> None:
    """What makes a handler fail costs its sender the link, and the failure is in the log."""
    async with pair(streams=0) as (attacker, victim):

        def fail(*_: object) -> None:
            raise RuntimeError("not foreseen")

        victim.on_message = fail
        (await attacker.connect(victim)).send({"t": "x"})
        await victim.until(lambda: victim.down)
        assert "a control message could not be handled" in caplog.text


@pytest.mark.parametrize("at", [None, "x" * 100, [1.5] * 100])
async def test_a_ping_that_wants_more_back(at: object) -> None:
    """A ping carries a number, and nothing else is sent back."""
    async with pair(streams=0) as (attacker, victim):
        (await attacker.connect(victim)).send({"t": "_ping", "at": at})
        await victim.until(lambda: victim.down)


async def test_links_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many identities a stranger has, an open run's peer keeps so many links; those it has go on."""
    monkeypatch.setattr("p2pavg.transport.links.endpoint.MAX_LINKS", 2)
    hosts = [await Host(Identity.generate()).start(run_id=RUN, streams=0) for _ in range(4)]
    try:
        for host in hosts[1:3]:
            await host.connect(hosts[0])
        with pytest.raises(UnreachableError, match="has 2 links, the most"):
            await hosts[3].connect(hosts[0])
        assert len(hosts[0].endpoint.links) == 2
    finally:
        for host in hosts:
            await host.close()


async def test_a_link_that_is_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose machine is gone says nothing more: after so many unanswered pings its link is closed."""
    monkeypatch.setattr(link, "_MOST_UNHEARD", 5)
    async with pair(streams=0) as (attacker, victim):
        await attacker.connect(victim)
        await victim.until(lambda: victim.up)
        theirs = victim.up[0]
        monkeypatch.setattr(theirs, "send", lambda message: None)  # pings that get no answer
        for _ in range(7):
            assert not victim.down
            theirs.ping()
        assert victim.down
        assert "nothing was heard" in victim.down[0][1]


async def test_a_state_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor that promises a state for which there is no memory: the download fails like any other, and is
    tried again; it does not end with an error that nobody awaits.
    """
    donor, size = Identity.generate(), 1 << 36
    hashes = bytes(state.HASH_BYTES * (size // state.chunk_bytes(size)))
    manifest = state.Manifest(3, bytes(32), 0, size, hashes).signed(donor.sign)

    class Donor:
        hello: ClassVar = {"key": donor.public_key}
        quiet_s = rtt_min = 0.0

        async def request(self, message: object, timeout: float) -> dict[str, object]:
            return manifest.to_message()

    def empty(size: int, dtype: object) -> None:
        raise MemoryError

    monkeypatch.setattr(downloader.np, "empty", empty)
    fetching = downloader.Downloader(None, None, 4)  # type: ignore[arg-type]
    links: Any = {donor.peer_id: Donor()}
    offers = await fetching.offers(lambda: [donor.peer_id], links, None)
    with pytest.raises(StateError, match=r"has 68\.7 GB"):
        await fetching.fetch(manifest, offers, links)
