"""Every parser of bytes that a stranger, or a broken disk, may have written: what to feed, and seeds.

A target takes bytes and returns; raising anything is a bug, and so is taking more than `MOST_BYTES_PER_BYTE`
of memory for each byte of input, beyond `SLACK_BYTES`.
"""

from __future__ import annotations

import functools
import ipaddress
import struct
import time
import zlib
from typing import Any

import lz4.block
import msgpack
import numpy as np

from p2pavg import blocks, codecs, native
from p2pavg.codecs import sparse
from p2pavg.credentials import Authority, statements
from p2pavg.errors import ProtocolError
from p2pavg.identity import Identity
from p2pavg.membership import closed, peerinfo
from p2pavg.membership.reach import pcp, pmp
from p2pavg.membership.table import beat, record, wire
from p2pavg.membership.table.carrying import streams
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.reading import Reading
from p2pavg.membership.table.records import entries as store
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.native import compiled
from p2pavg.transport import frames
from p2pavg.transport.links import handshake, proofs
from p2pavg.transport.sealing import Opener, Sealer
from tests.fuzz import files, meetings, told
from tests.fuzz.target import Target, quiet

MOST_BYTES_PER_BYTE = 256  # a one-byte msgpack item becomes a Python object
SLACK_BYTES = 4 << 20


# -- membership


def _record() -> record.SignedRecord:
    chain = record.Chain()
    return record.sign_record(
        Identity.generate(), b"k" * 20, b"value", incarnation=1, sequence=2, lifetime=9.0, anchor=chain.anchor
    )


def _parse_record(data: bytes) -> None:
    parsed = record.parse_record(data)
    if parsed is not None:
        record.has_valid_signature(parsed)
        assert parsed.encoded == data


def _beats() -> list[bytes]:
    made = beat.Beat(b"run", b"send", 7, record.Refresh(3, b"l" * 10), 1, b"dig")
    told = made._replace(heard=(beat.Heard(b"told", 9, record.Refresh(4, b"m" * 10), 12),))
    return [data for each in (made, told) for data in (each.encode(), each.encode(b"k" * 32))]


_AUTHORITY = Authority.new("run")
_AUTHORITY_KEY = _AUTHORITY.key.public_key()


def _take_revocations(data: bytes) -> None:
    """What others say of former members: nobody is revoked but by the authority's word."""
    revoked = closed.Revoked(lambda statement: statements.is_revocation(_AUTHORITY_KEY, statement))
    for peer_id in revoked.add(data):
        assert statements.is_revocation(_AUTHORITY_KEY, revoked.of([peer_id]))
    page, following = revoked.page(data[:20])
    assert len(page) <= closed.PAGE_BYTES
    assert len(following) in (0, 20)


def _parse_beat(data: bytes) -> None:
    parsed = beat.decode_beat(data)
    if parsed is not None:
        assert data.startswith(parsed.encode())
        parsed.is_authentic(b"k" * 32)


def _datagrams() -> list[bytes]:
    head = (bytes(wire.TRANSACTION_BYTES), b"p" * 20, wire.NO_TOKEN)
    proof = bytes(wire.PROOF_BYTES)
    return [
        wire.encode(1, 0, *head, [b"x", 3, None]),
        wire.encode(2, wire.Flag.PROOF, *head, [[1, 2], "text"], proof=proof),
    ]


def _infos() -> list[bytes]:
    info = peerinfo.PeerInfo(b"p" * 20, (("10.0.0.1", 31330),), epoch=3, lineage=b"l" * 32, region="eu")
    return [info.encode()]


# -- transport


def _hellos() -> list[bytes]:
    identity = Identity.generate()
    made = handshake.make_hello(identity, "run", 31330, 5, {"schema": b"s" * 32, "terms": {"a": 1}})
    refusal = handshake.SUPERSEDED.message()
    return [handshake.pack(facts)[handshake.HEAD_BYTES :] for facts in (made.facts, refusal)]


def _parse_hello(data: bytes) -> None:
    hello = handshake.parse_hello(handshake.unpack(data))
    handshake.check(hello, hello)


def _preambles() -> list[bytes]:
    parties = [handshake.Party(b"runtag", closed) for closed in (False, True)]
    return [handshake.preamble(kind, party) for kind in (1, 2, 3, 4) for party in parties]


def _parse_preamble(data: bytes) -> None:
    party = handshake.Party(b"runtag", False)
    raw = data[: handshake.PREAMBLE_BYTES].ljust(handshake.PREAMBLE_BYTES, b"\0")
    whole = raw[:-4] + zlib.crc32(raw[:-4]).to_bytes(4, "little")  # an attacker can calculate, too
    try:
        handshake.parse_preamble(raw, party)
    except ProtocolError:
        handshake.parse_preamble(whole, party)


def _streams() -> list[bytes]:
    hello = proofs.stream_hello(b"s" * 32, 3)
    return [handshake.pack(hello)[handshake.HEAD_BYTES :]]


def _parse_stream(data: bytes) -> None:
    message = handshake.unpack(data)
    proofs.stream_answer(b"s" * 32, message)


def _frames() -> list[bytes]:
    body = frames.Heartbeat(7, 0.1, 0.2).pack()
    ping = frames.Header(frames.Kind.PING, len(body), body_crc=zlib.crc32(body))
    chunk = frames.Header(frames.Kind.CONTRIBUTION, 4000, codec=1, transfer=9, part=1, chunk=2, count=1000)
    return [frames.pack(ping) + body, frames.pack(chunk)]


def _parse_frame(data: bytes) -> None:
    raw = data[: frames.HEADER_BYTES].ljust(frames.HEADER_BYTES, b"\0")
    head = raw[:-4] + struct.pack("<I", zlib.crc32(raw[:-4]))  # else hardly anything gets past the checksum
    header = frames.parse(head)
    assert header.length <= frames.MAX_BODY_BYTES
    if header.kind in (frames.Kind.PING, frames.Kind.PONG):
        frames.Heartbeat.parse(data[frames.HEADER_BYTES :])


def _sealed() -> list[bytes]:
    head = frames.pack(frames.Header(frames.Kind.BLOB, 5))
    header, body = Sealer(b"k" * 32).seal(head, memoryview(b"hello"))
    return [header + bytes(body)]


def _parse_sealed(data: bytes) -> None:
    opener = Opener(b"k" * 32)
    head = data[:40].ljust(40, b"\0")
    opener.header(memoryview(head))
    header = frames.parse(head, checked=True)
    body = bytearray(data[40 : 40 + header.length])
    opener.body(memoryview(body), memoryview(data[40 + header.length :][:16].ljust(16, b"\0")))


def _blocks() -> list[bytes]:
    return [lz4.block.compress(bytes(900) + b"touched" * 14 + bytes(2), store_size=False), b""]


def _unpack(data: bytes) -> None:
    whole = memoryview(bytearray(1000))
    for fits in (blocks.unpack(memoryview(data), whole), native.available() and _unpack_here(data)):
        assert fits in (True, False)


def _unpack_here(data: bytes) -> bool:
    room = bytearray(1064)
    fits = compiled.lz4_unpack(data, memoryview(room)[:1000])
    assert not any(room[1000:])
    return fits


_SPARSE, _SPARSE_COUNT = codecs.get("sparse-64"), 4096 + 200


def _contributions() -> list[bytes]:
    values = np.linspace(-1, 1, _SPARSE_COUNT, dtype=np.float32)
    data = np.empty(_SPARSE.encoded_size(_SPARSE_COUNT), np.uint8)
    _SPARSE.encode(values, data, 1.0)
    return [data.tobytes(), bytes(len(data))]


def _take_contribution(data: bytes) -> None:
    """What a member sends to all others: both implementations refuse the same, and write nowhere else."""
    body = data.ljust(_SPARSE.encoded_size(_SPARSE_COUNT), b"\0")
    sound = sparse.check(_SPARSE.wire_id, body, _SPARSE_COUNT)
    assert codecs.is_sound(_SPARSE, body, _SPARSE_COUNT) == sound
    if len(body) == _SPARSE.encoded_size(_SPARSE_COUNT):
        room = np.zeros(_SPARSE_COUNT + 16, np.float32)
        assert _SPARSE.decode_add(body, room[:_SPARSE_COUNT], 0.5) == sound
        _SPARSE.decode(body, room[:_SPARSE_COUNT])
        assert not room[_SPARSE_COUNT:].any()
        assert np.isfinite(room).all() or not sound


# -- the table


def _entry() -> bytes:
    made = _record()
    held = RecordStore()
    held.offer(made, record.Refresh(0, made.anchor), 9.0, 0.0)
    entries, _ = held.page(made.key, b"", 1000, 0.0)
    return b"".join(entry.encode() for entry in entries)


class _Node(Node):
    """Asks nobody: what others answer is another target."""

    def _check_sender(self, message: wire.Message, address: tuple[str, int]) -> None: ...


@functools.cache
def _node() -> Node:
    """One for all inputs: what it stores of them needs signatures, which they cannot make."""
    node = _Node(Identity.generate(), k=4, client_only=False, clock=time.monotonic)
    node.dial = lambda host, port: 1
    return node


_ROOM = 1000


def _requests() -> list[bytes]:
    made, key, link = _record(), b"k" * 20, bytes(record.LINK_BYTES)
    prefix = made.peer_id[: store.PREFIX_BYTES]
    asked: list[tuple[wire.RequestKind, list[Any]]] = [
        (wire.RequestKind.PING, []),
        (wire.RequestKind.FIND, [b"p" * 20]),
        (wire.RequestKind.STORE, [made.encoded, 0, made.anchor, 9000, bytes(64)]),
        (wire.RequestKind.REVOKED, [key, prefix, b"s" * 84]),
        (wire.RequestKind.INDEX, [key, b"", b""]),
        (wire.RequestKind.INDEX, [key, prefix, b"d" * store.DIGEST_BYTES]),
        (wire.RequestKind.FETCH, [key, prefix]),
        (wire.RequestKind.ENTRIES, [key, prefix]),
        (wire.RequestKind.DIAL, [31330]),
        (wire.RequestKind.REFRESH, [key, prefix, made.incarnation, made.sequence, 3, link]),
    ]
    head = (bytes(wire.TRANSACTION_BYTES), b"p" * 20, wire.NO_TOKEN)
    return [wire.encode(kind, 0, *head, body) for kind, body in asked]


async def _take_request(data: bytes) -> None:
    """From somebody that has proved its address, and from somebody else: the answer fits its datagram."""
    message = wire.decode(data)
    for returnable in (True, False) if message is not None else ():
        answer = _node().handle(message, ("192.0.2.1", 31330), returnable, _ROOM)
        assert answer is None or len(msgpack.packb(answer)) <= _ROOM + 160


def _answers() -> list[bytes]:
    made = _record()
    contacts = wire.pack_contacts([wire.Contact(b"c" * 20, ("192.0.2.2", 31330))])
    bodies: list[list[Any]] = [
        [_entry(), b"", 1, b"d" * store.DIGEST_BYTES, contacts],
        [_entry(), b"c" * store.PREFIX_BYTES, 1, b"d" * store.DIGEST_BYTES, contacts],
        [[made.encoded, 0, made.anchor, 9000, wire.pack_contacts([wire.Contact(b"", ("192.0.2.3", 1))])]],
        [contacts],
    ]
    return [msgpack.packb(body) for body in bodies]


async def _take_answer(data: bytes) -> None:
    """As an answer to everything that is asked in the table."""
    try:
        body = msgpack.unpackb(data)
    except wire.MALFORMED:
        return
    if not isinstance(body, list):
        return
    node, asked = _node(), wire.Contact(b"a" * 20, ("192.0.2.1", 31330))
    message = wire.Message(wire.RequestKind.INDEX, wire.Flag.ANSWER, b"", asked.id, b"", body, b"")
    node._closer_contacts(message, asked)
    reading = Reading(node, b"k" * 20)
    reading._first_page(asked, body)
    for item in body:
        reading._keep(asked, item)
    reading._cancel()  # what it would ask next
    await reading._finish()


def _table_frames() -> list[bytes]:
    requests = b"".join(map(streams.pack_frame, _requests()))
    return [streams.head(31330) + requests, streams.head(0) + requests[:-3]]


def _take_table_frames(data: bytes) -> None:
    """What a connection of the table brings: whole datagrams, none longer than any may be."""
    streams.parse_head(data[: streams.HEAD_BYTES])
    left = bytearray(data[streams.HEAD_BYTES :])
    whole = len(left)
    taken = b"".join(map(streams.pack_frame, streams.take_frames(left)))
    assert len(taken) + len(left) == whole
    assert len(left) < 2 + wire.MAX_DATAGRAM


# -- gateways


_PMP = (pmp.ask_address(), pmp.ask_port("tcp", 80, 81, 600))
_PCP = pcp.ask_port("192.168.1.5", "tcp", 80, 81, 600, b"n" * pcp.NONCE_BYTES)


def _gateway_answers() -> list[bytes]:
    where = bytes(10) + b"\xff\xff" + bytes((203, 0, 113, 7))
    by_pcp = (
        struct.pack("!BBBBII12x", 2, 0x81, 0, 0, 600, 5) + _PCP[24:40] + struct.pack("!HH", 80, 81) + where
    )
    return [
        struct.pack("!BBHI4s", 0, 128, 0, 5, b"\xcb\0q\x07"),
        struct.pack("!BBHIHHI", 0, 130, 0, 5, 80, 81, 600),
        by_pcp,
    ]


def _take_gateway_answer(data: bytes) -> None:
    """What a gateway, or who pretends to be one, answers: an address that is one, and a port of 16 bits."""
    for answer in (*(pmp.read(data, request) for request in _PMP), pcp.read(data, _PCP)):
        if answer is not None and not answer.result:
            assert not answer.address or ipaddress.ip_address(answer.address)
            assert 0 <= answer.outside_port < 65536


TARGETS = {
    target.name: target
    for target in (
        Target("record", _parse_record, lambda: [_record().encoded]),
        Target("entries", store.decode_entries, lambda: [_entry()]),
        Target("beat", _parse_beat, _beats),
        Target("revocations", _take_revocations, lambda: [_AUTHORITY.revoke([b"p" * 20, b"q" * 20]).revoked]),
        Target("datagram", wire.decode, _datagrams),
        Target("contacts", lambda data: wire.unpack_contacts(data, 20), lambda: [bytes(26)]),
        Target("peerinfo", lambda data: peerinfo.PeerInfo.decode(data, b"p" * 20, 1), _infos),
        Target("table-request", told.in_loop(_take_request), _requests),
        Target("table-answer", told.in_loop(_take_answer), _answers),
        Target("table-frames", quiet(_take_table_frames, ValueError), _table_frames),
        Target("gateway-answer", _take_gateway_answer, _gateway_answers),
        Target("preamble", quiet(_parse_preamble, ProtocolError, handshake.Refusal), _preambles),
        Target("hello", quiet(_parse_hello, ProtocolError, handshake.Refusal), _hellos),
        Target("stream", quiet(_parse_stream, ProtocolError), _streams),
        Target("frame", quiet(_parse_frame, ProtocolError), _frames),
        Target("sealed", quiet(_parse_sealed, ProtocolError), _sealed),
        Target("packed", _unpack, _blocks),
        Target("sparse-contribution", _take_contribution, _contributions),
        *told.TARGETS,
        *meetings.TARGETS,
        *files.TARGETS,
    )
}
