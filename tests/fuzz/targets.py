"""Every parser of bytes that a stranger, or a broken disk, may have written: what to feed, and seeds.

A target takes bytes and returns; raising anything is a bug, and so is taking more than `MOST_BYTES_PER_BYTE`
of memory for each byte of input, beyond `SLACK_BYTES`.
"""

from __future__ import annotations

import base64
import functools
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np

from p2pavg import credentials
from p2pavg.credentials import Authority, Credentials, texts
from p2pavg.errors import ConfigurationError, CredentialError, ProtocolError, StateError
from p2pavg.identity import Identity
from p2pavg.lab import topology
from p2pavg.membership import beat, peerinfo, record, store, wire
from p2pavg.rounds import checkpoints, messages, state
from p2pavg.rounds.ballot import Ballot
from p2pavg.transport import frames, handshake, proofs
from p2pavg.transport.sealing import Opener, Sealer

MOST_BYTES_PER_BYTE = 256  # a one-byte msgpack item becomes a Python object
SLACK_BYTES = 4 << 20

Parser = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    name: str
    parse: Parser
    seeds: Callable[[], list[bytes]]


def _quiet(parser: Parser, *expected: type[Exception]) -> Parser:
    """Errors that the parser documents are no bugs."""

    def parse(data: bytes) -> object:
        try:
            return parser(data)
        except expected:
            return None

    return parse


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
    return [made.encode(), made.encode(b"k" * 32)]


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
    return [handshake.preamble(kind, party) for kind in (1, 2) for party in parties]


def _parse_preamble(data: bytes) -> None:
    handshake.parse_preamble(data[:16].ljust(16, b"\0"), handshake.Party(b"runtag", False))


def _streams() -> list[bytes]:
    hello = proofs.stream_hello(b"s" * 32, 3, 4096)
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


# -- rounds


def _rounds() -> list[bytes]:
    ballot = Ballot(3, 1, b"p" * 20)
    made = [
        messages.Prepare(ballot, b"l" * 32, (b"p" * 20, b"q" * 20), (True, True), ((0, 0, 5), (1, 5, 5))),
        messages.Begin(ballot, (1.0, 2.0), (1, 2), (True, False)),
        messages.Committed(ballot, (1.0,), (1,), (b"d" * 32,)),
        messages.Query(ballot, b"l" * 32),
        messages.Promise(ballot, None),
        messages.Aborted(ballot, ballot, "why", (b"p" * 20,), False),
        messages.Stalled(ballot, (0,), (1,), True),
        messages.Leaving(4),
    ]
    return [msgpack.packb(messages.to_dict(message)) for message in made]


def _parse_round(data: bytes) -> None:
    parsed = messages.from_dict(handshake.unpack(data))
    assert messages.from_dict(messages.to_dict(parsed)) == parsed


def _manifests() -> list[bytes]:
    made = state.describe(3, b"l" * 32, 10, np.zeros(100, np.uint8))
    return [msgpack.packb(made.signed(Identity.generate().sign).to_message())]


def _parse_manifest(data: bytes) -> None:
    made = state.Manifest.from_message(handshake.unpack(data))
    made.check(b"k" * 32)


def _states() -> list[bytes]:
    packed = {"dict": [["a", {"tensor": ["float32", [2, 3], 0]}]]}
    meta = msgpack.packb({"meta": packed, "buffers": [["t", 64]]})
    return [struct.pack("<H", len(meta)) + meta + bytes(64)]


def _parse_state(data: bytes) -> None:
    """What a donor sent, hashes right: its own metadata, then the trees inside it."""
    from p2pavg.optim import tree

    head, blob = data[:2].ljust(2, b"\0"), np.frombuffer(data[2:], np.uint8)
    meta_bytes = min(struct.unpack("<H", head)[0], blob.nbytes)
    manifest = state.describe(1, b"l" * 32, meta_bytes, blob)
    inside = state.unpack(manifest, blob)
    for section in (*inside.buffers.values(), blob[:0]):
        tree.unpack(inside.meta, section)


# -- files


@functools.cache
def _memory_file() -> tuple[int, Path]:
    """(descriptor, path) of a private file; in memory where that can be, for disks are slow."""
    if not hasattr(os, "memfd_create"):
        descriptor, name = tempfile.mkstemp()
        return descriptor, Path(name)
    descriptor = os.memfd_create("fuzz")
    os.fchmod(descriptor, 0o600)
    return descriptor, Path(f"/proc/self/fd/{descriptor}")


def _file_with(data: bytes) -> Path:
    descriptor, path = _memory_file()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    return path


_ABOUT = checkpoints.About("run", b"s" * 32, "a model", "torch")


class _OneFile(checkpoints.Checkpoints):
    """Finds the file in memory, however it is named."""

    def paths(self) -> list[Path]:
        return [_memory_file()[1]]


def _checkpoint_files() -> list[bytes]:
    packed = msgpack.packb({"meta": {}, "buffers": [["t", 64]]}) + bytes(64)
    blob = np.frombuffer(packed, np.uint8)
    manifest = state.describe(3, b"l" * 32, len(packed) - 64, blob)
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoints.Checkpoints(folder, _ABOUT)
        path = saved.save(manifest, blob, [[2, b"l" * 32, 7, 8, 24, b"p" * 20]])
        assert path is not None
        return [path.read_bytes()]


def _parse_checkpoint(data: bytes) -> None:
    _OneFile(_file_with(data).parent, _ABOUT).newest()


_AUTHORITY = Authority.new("run")
_KEPT, _REQUEST = credentials.new_request()
_INVITATION = _AUTHORITY.invite(_REQUEST)


def _credentials() -> list[bytes]:
    lines = [
        _AUTHORITY.to_text(),
        credentials.new_secret("run"),
        _KEPT,
        _REQUEST,
        _INVITATION,
        _AUTHORITY.member().to_text(),
    ]
    bodies = []
    for text in lines:
        kind, fields = texts.from_text(text)
        bodies.append(bytes([texts.KINDS.index(kind)]) + msgpack.packb(fields))
    return bodies


def _parse_credentials(data: bytes) -> None:
    """As what its kind is for; when the first byte has its highest bit, as everything that it is not, too."""
    kind = texts.KINDS[data[0] % len(texts.KINDS)] if data else "member"
    text = f"p2pavg-{kind}:" + base64.urlsafe_b64encode(data[1:]).decode()
    users: dict[str, Callable[[], object]] = {
        "member": lambda: Credentials.load(text).context(server=True),
        "authority": lambda: Authority.load(text).invite(_REQUEST),
        "request": lambda: _AUTHORITY.invite(text),
        "invitation": lambda: credentials.accept(_KEPT, text),
        "request-key": lambda: credentials.accept(text, _INVITATION),
        "secret": lambda: Credentials.load(text),
        "certificate": lambda: credentials.certificate_key(data),
    }
    for use in users.values() if data[:1] >= b"\x80" else (users[kind], users["certificate"]):
        _quiet(lambda _, use=use: use(), CredentialError)(data)  # type: ignore[misc]


def _parse_credentials_file(data: bytes) -> None:
    Credentials.load(_file_with(data))


def _topologies() -> list[bytes]:
    files = Path(topology.__file__).parent / "topologies"
    return [path.read_bytes() for path in sorted(files.glob("*.toml"))]


def _parse_topology(data: bytes) -> None:
    topology.parse(data.decode(errors="replace"), "fuzzed").configuration()


TARGETS = {
    target.name: target
    for target in (
        Target("record", _parse_record, lambda: [_record().encoded]),
        Target("entries", store.decode_entries, lambda: [_entry()]),
        Target("beat", _parse_beat, _beats),
        Target("datagram", wire.decode, _datagrams),
        Target("contacts", lambda data: wire.unpack_contacts(data, 20), lambda: [bytes(26)]),
        Target("peerinfo", lambda data: peerinfo.PeerInfo.decode(data, b"p" * 20, 1), _infos),
        Target("preamble", _quiet(_parse_preamble, ProtocolError, handshake.Refusal), _preambles),
        Target("hello", _quiet(_parse_hello, ProtocolError, handshake.Refusal), _hellos),
        Target("stream", _quiet(_parse_stream, ProtocolError), _streams),
        Target("frame", _quiet(_parse_frame, ProtocolError), _frames),
        Target("sealed", _quiet(_parse_sealed, ProtocolError), _sealed),
        Target("round", _quiet(_parse_round, ProtocolError), _rounds),
        Target("manifest", _quiet(_parse_manifest, ProtocolError, StateError), _manifests),
        Target("state", _quiet(_parse_state, StateError), _states),
        Target("credentials", _parse_credentials, _credentials),
        Target(
            "credentials-file", _quiet(_parse_credentials_file, CredentialError), lambda: [_KEPT.encode()]
        ),
        Target("checkpoint", _quiet(_parse_checkpoint, StateError), _checkpoint_files),
        Target("topology", _quiet(_parse_topology, ConfigurationError), _topologies),
    )
}


def _entry() -> bytes:
    made = _record()
    held = store.RecordStore()
    held.offer(made, record.Refresh(0, made.anchor), 9.0, 0.0)
    entries, _ = held.page(made.key, b"", 1000, 0.0)
    return b"".join(entry.encode() for entry in entries)
