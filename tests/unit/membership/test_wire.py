from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.errors import ConfigurationError
from p2pavg.identity import Identity
from p2pavg.membership import View
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table import address as addresses
from p2pavg.membership.table.address import (
    format_host_port,
    normalise,
    pack_address,
    parse_host_port,
    unpack_address,
)
from p2pavg.membership.table.beat import BEAT_BYTES, MOST_HEARD, Beat, Heard, decode_beat
from p2pavg.membership.table.record import Refresh
from p2pavg.membership.table.records.entries import ENTRY_BYTES
from p2pavg.membership.table.wire import (
    CONTACT_BYTES,
    MAX_DATAGRAM,
    Contact,
    Flag,
    Message,
    RequestKind,
    decode,
    encode,
    matches,
    pack_contacts,
    unpack_contacts,
)

SENDER = b"s" * 20


def test_a_message_survives_its_encoding() -> None:
    """Header, body, proof and padding come back as they were."""
    asked = pack_address(("192.0.2.1", 31330))
    flags = Flag.PROVE | Flag.PROOF
    data = encode(
        RequestKind.FIND,
        flags,
        b"t" * 8,
        SENDER,
        b"k" * 8,
        [b"x", 1],
        asked=asked,
        proof=b"p" * 96,
        pad_to=400,
    )
    assert len(data) == 400
    message = decode(data)
    assert message is not None
    assert (message.kind, message.flags, message.transaction) == (RequestKind.FIND, flags, b"t" * 8)
    assert (message.sender, message.token, message.body) == (SENDER, b"k" * 8, [b"x", 1])
    assert (message.asked, message.proof, message.size) == (asked, b"p" * 96, 400)


def test_no_datagram_is_fragmented() -> None:
    """A message beyond 1200 bytes is refused by its sender, and by its receiver."""
    with pytest.raises(ValueError, match="fragmented"):
        encode(1, 0, b"t" * 8, SENDER, b"k" * 8, [b"x" * 1200])
    assert decode(b"pD\x01" + bytes(MAX_DATAGRAM)) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(data: bytes) -> None:
    """Decoders return None, or a message, for any bytes; they never raise."""
    decode(data)
    decode(encode(1, 0, b"t" * 8, SENDER, b"k" * 8, [])[:43] + data)
    decode_beat(data)
    PeerInfo.decode(data, SENDER, 1)
    unpack_contacts(data, 8)


def test_matches_checks_number_and_exact_types() -> None:
    """A body of the wrong arity or type does not match; a bool is no int."""
    assert matches([b"", 1], bytes, int)
    assert not matches([b"", True], bytes, int)
    assert not matches([b""], bytes, int)
    assert not matches([b"", 1, 2], bytes, int)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=64)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255), st.lists(junk, max_size=6)), max_size=20))
def test_a_node_survives_any_message(messages: list[tuple[int, int, list[Any]]]) -> None:
    """Messages of any kind, flags, arity and types neither raise nor stop a node from answering."""

    async def scenario() -> None:
        net = Network(seed=1)
        node = await net.start()
        other = await net.start(["10.0.0.2:31330"])
        here, stranger = ("10.0.0.2", 31330), ("10.9.0.1", 1)
        raised: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        token = node.node.rpc.token_for(stranger)
        for kind, flags, body in messages:
            for known in (token, bytes(8)):
                asked = pack_address(here) if flags & Flag.PROVE else b""
                data = encode(kind, flags & ~8, b"t" * 8, SENDER, known, body, asked=asked)
                net.send(data, stranger, here)
        await asyncio.sleep(5.0)
        assert not raised
        assert await other.store(b"k" * 20, b"v", 5.0)
        await asyncio.gather(node.stop(), other.stop())

    simulate(scenario())


def test_a_beat_is_small_and_survives_its_encoding() -> None:
    """A heartbeat has 25 bytes, and comes back as it was."""
    beat = Beat(b"run", b"send", 70000, Refresh(7, b"0123456789"), 1, b"dig")
    data = beat.encode()
    assert len(data) == BEAT_BYTES == 25
    assert decode_beat(data) == beat._replace(sequence=70000 & 0xFFFF)
    told = beat._replace(
        sequence=7, heard=tuple(Heard(b"told", n, Refresh(n, b"l" * 10), n) for n in (0, 255))
    )
    for key in (None, b"k" * 32):
        again = decode_beat(told.encode(key))
        assert again is not None
        assert again._replace(tag=b"") == told
        assert key is None or again.is_authentic(key)
    assert decode_beat(told.encode()[:-1]) is None
    assert decode_beat(told._replace(heard=told.heard * MOST_HEARD).encode()) is None
    assert decode_beat(data[:-1]) is None


def test_addresses_of_both_families() -> None:
    """IPv4 and IPv6 travel; a mapped address is IPv4; impossible addresses are refused."""
    for address in (("10.0.0.1", 5), ("2001:db8::7", 65535), ("127.0.0.1", 1)):
        assert unpack_address(pack_address(address)) == address
    assert normalise(("::ffff:10.0.0.1", 5, 0, 0)) == ("10.0.0.1", 5)
    for address in (("224.0.0.1", 5), ("0.0.0.0", 5), ("255.255.255.255", 5), ("::", 5), ("10.0.0.1", 0)):
        assert unpack_address(pack_address(address)) is None
    contacts = [Contact(SENDER, ("10.0.0.1", 5)), Contact(SENDER, ("2001:db8::7", 6))]
    assert unpack_contacts(pack_contacts(contacts), 8) == contacts
    assert unpack_contacts(pack_contacts(contacts), 1) is None
    assert unpack_contacts(pack_contacts(contacts)[1:], 8) is None


def test_addresses_as_people_write_them() -> None:
    """Names, IPv4 and bracketed IPv6 parse; a bare IPv6 address is called ambiguous."""
    assert parse_host_port("node.example:31330") == ("node.example", 31330)
    assert parse_host_port(" 10.0.0.5:1 ") == ("10.0.0.5", 1)
    assert parse_host_port("[2001:db8::7]:31330") == ("2001:db8::7", 31330)
    assert format_host_port("2001:db8::7", 31330) == "[2001:db8::7]:31330"
    with pytest.raises(ConfigurationError, match="ambiguous"):
        parse_host_port("2001:db8::7:31330")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://10.0.0.5:31330", "is a URL"),
        ("10.0.0.5:99999", "has port 99999, and ports are 1 to 65535"),
        ("10.0.0.5:0", "has port 0, and ports are 1 to 65535"),
        ("10.0.0.5", "is not an address"),
        (":31330", "is not an address"),
        ("a..b:31330", "is not an address"),
        ("x" * 64 + ".example:31330", "is not an address"),
        ("10.0.0.5/run:31330", "is not an address"),
        ("10.0.0.5:port", "is not an address"),
        ("10.0.0.5:٣", "is not an address"),
    ],
)
def test_what_is_no_address_is_told(text: str, why: str) -> None:
    """What is wrong with a text is said, with the text and the right form."""
    with pytest.raises(ConfigurationError, match=why) as caught:
        parse_host_port(text)
    assert repr(text) in str(caught.value)
    assert "write host:port" in str(caught.value)


@pytest.mark.parametrize(
    ("four", "six", "listens", "found"),
    [
        ("10.0.0.5", None, "0.0.0.0", ["10.0.0.5"]),
        ("10.0.0.5", "2001:db8::7", "0.0.0.0", ["10.0.0.5"]),
        ("10.0.0.5", None, "::", ["10.0.0.5"]),
        ("10.0.0.5", "2001:db8::7", "::", ["10.0.0.5", "2001:db8::7"]),
        (None, "2001:db8::7", "::", ["2001:db8::7"]),
        (None, None, "0.0.0.0", ["127.0.0.1"]),
        (None, None, "::", ["127.0.0.1"]),
    ],
)
def test_a_machine_announces_an_address_of_each_family(
    monkeypatch: pytest.MonkeyPatch, four: str | None, six: str | None, listens: str, found: list[str]
) -> None:
    """A peer that listens on both families announces an address of each that its machine has."""
    have = {socket.AF_INET: four, socket.AF_INET6: six}
    monkeypatch.setattr(addresses, "primary_address", lambda family=socket.AF_INET: have[family])
    assert addresses.own_addresses(listens) == found


def test_a_peers_words_survive_their_encoding() -> None:
    """All fields of a PeerInfo travel, except what the record itself says."""
    info = PeerInfo(
        Identity.generate().peer_id,
        (("10.0.0.1", 31330), ("2001:db8::7", 31330)),
        client_only=True,
        region="eu-west",
        epoch=12,
        lineage=b"l" * 20,
        samples_per_second=1.5,
        role="watcher",
        model=b"m" * 20,
        incarnation=77,
        departing=True,
        udp=False,
    )
    assert PeerInfo.decode(info.encode(), info.peer_id, 77) == info
    assert len(info.encode()) < 200
    assert info.differs_only_in_progress(PeerInfo(**{**vars(info), "epoch": 13}))
    assert not info.differs_only_in_progress(PeerInfo(**{**vars(info), "region": "us"}))


SENDABLE = 1000  # bytes of an answer that fits into a datagram with its head and proofs

page_like = st.tuples(
    st.binary(min_size=ENTRY_BYTES, max_size=ENTRY_BYTES).flatmap(
        lambda e: st.integers(0, 4).map(lambda n: n * e)
    ),
    st.sampled_from([b"", b"\x80" * 8]),
    st.integers(0, 2**40),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=CONTACT_BYTES, max_size=CONTACT_BYTES),
).map(list)
items_like = st.lists(
    st.tuples(
        st.binary(max_size=300),
        st.integers(0, 300),
        st.binary(max_size=12),
        st.integers(0, 2**40),
        st.binary(max_size=18),
    ).map(list)
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(junk, max_size=5) | page_like | items_like, min_size=1, max_size=12))
def test_a_node_survives_any_answer(answers: list[list[Any]]) -> None:
    """A node that answers junk to everything neither stops the others nor makes them raise."""

    async def scenario() -> None:
        net = Network(seed=2)
        nodes = [await net.start()]
        nodes += [await net.start(["10.0.0.2:31330"]) for _ in range(3)]
        raised: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        honest = nodes[1].node.handle
        turn = itertools.cycle(answers)

        def handle(message: Message, *rest: Any) -> list[Any] | None:
            if message.kind == RequestKind.PING:
                return honest(message, *rest)
            answer = next(turn)
            return answer if len(msgpack.packb(answer)) <= SENDABLE else []

        nodes[1].node.handle = handle  # type: ignore[method-assign]
        async with asyncio.timeout(60.0):
            view = View(nodes[2], "r")
            await view.refresh_now()
            await view.announce(PeerInfo(nodes[2].identity.peer_id, (("10.0.0.4", 31330),)))
            await nodes[0].store(b"k" * 20, b"v", 30.0)
            for node in (nodes[0], nodes[2], nodes[3]):
                assert [record.value for record in (await node.get(b"k" * 20)).values()] == [b"v"]
            await nodes[3].check_reachability()
        view.close()
        await asyncio.gather(*(node.stop() for node in nodes))
        assert not raised

    simulate(scenario())
