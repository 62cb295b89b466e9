"""The handshake's messages, by which two peers find out whether they belong together. Pure: bytes and dicts
in, verdicts out.

Every TCP connection begins with a 20-byte preamble from each side. On a control connection the dialler sends
its hello, the listener answers with its own hello and a signature over both, the dialler signs too, and the
listener says ok. A side that refuses sends the reason instead of its next message. A data stream belongs to a
link whose two sides share a secret, so a MAC proves the stream (see proofs.py). On an observing connection
the listener tells the dialler from which address it comes. A tunnel names the token under which a relay
expects it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from p2pavg import __version__, outline
from p2pavg.errors import (
    ConfigurationError,
    CredentialError,
    IdentityInUseError,
    IncompatiblePeerError,
    P2PAvgError,
    ProtocolError,
    UnreachableError,
)
from p2pavg.identity import (
    OWN_IDENTITY,
    PEER_ID_BYTES,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    short_id,
)
from p2pavg.printable import printable

WIRE_VERSION = (2, 0)  # major, minor: see "Versions" in docs/design.md
CONTROL, DATA, OBSERVE, TUNNEL = 1, 2, 3, 4
PREAMBLE_BYTES = 20
MOST_ITEMS = 1 << 14  # of one array in a message
MAX_HELLO_BYTES = 4096
NONCE_BYTES = 16
TOKEN_BYTES = 32
RUN_BYTES = 16
SCHEMA_BYTES = 32

PREAMBLE_RUN_BYTES = 6
OTHER_RUN = "the peer at that address is in another run; check run_id and initial_peers"

_SIGNATURE_ROOM = SIGNATURE_BYTES + 8  # a listener's hello carries a signature
_MAGIC = b"P2PAVG"
_CRC_BYTES = 4
_PREAMBLE = struct.Struct(f"<6sBBBB6s{_CRC_BYTES}s")
_HEAD = struct.Struct("<II")
HEAD_BYTES = _HEAD.size + _CRC_BYTES


class Refusal(Exception):
    """Two peers do not belong together. code: for programs; text: the reason and the remedy, for people."""

    def __init__(self, code: str, text: str, since: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.since = since  # of a "duplicate": the incarnation of the other process

    def message(self) -> dict[str, Any]:
        return {"refuse": self.code, "why": self.text} | ({"since": self.since} if self.since else {})

    def error(self) -> P2PAvgError:
        """The error that the caller of `connect` sees."""
        if self.code in ("version", "run", "model", "terms"):
            return IncompatiblePeerError(self.text)
        if self.code == "credentials":
            return CredentialError(self.text)
        if self.code == "duplicate":
            return IdentityInUseError(self.text, self.since)
        if self.code == "self":
            return ConfigurationError(self.text)
        if self.code == "malformed":
            return ProtocolError(self.text)
        return UnreachableError(self.text)


class SecondUse(Refusal):
    """The other side's identity is that of another process, which lives and has a link with this peer."""

    def __init__(self, peer_id: bytes, since: int) -> None:
        super().__init__(
            "duplicate",
            f"another live process uses the identity of peer {short_id(peer_id)}; {OWN_IDENTITY}",
            since,
        )

    def error(self) -> P2PAvgError:
        return ConfigurationError(self.text)  # the other side's identity is in use, not this peer's


# Codes beyond those of `Refusal.error`: "identity" (not the expected peer), "superseded" (another connection
# between the same two peers is kept), "closing".
SUPERSEDED = Refusal("superseded", "another connection between these two peers is kept")


@dataclass(frozen=True, slots=True)
class Party:
    """The facts about its sender with which every connection begins."""

    run: bytes = b""  # the first PREAMBLE_RUN_BYTES of the sender's run_tag
    closed: bool = False  # the sender has credentials, and speaks with members only

    @classmethod
    def of(cls, run_id: str, *, closed: bool) -> Party:
        return cls(run_tag(run_id)[:PREAMBLE_RUN_BYTES], closed)


def preamble(kind: int, party: Party) -> bytes:
    major, minor = WIRE_VERSION
    raw = _PREAMBLE.pack(_MAGIC, major, minor, kind, party.closed, party.run, b"")
    return _checked(raw[:-_CRC_BYTES])


def parse_preamble(raw: bytes, mine: Party) -> int:
    """The connection's kind.

    Raises ProtocolError for a stranger and for damaged bytes, Refusal for another major wire version or run,
    and when only one of the two sides has credentials.
    """
    magic, major, minor, kind, closed, run, _ = _PREAMBLE.unpack(raw)
    if magic != _MAGIC:
        raise ProtocolError("this is not a p2pavg connection")
    if _checked(raw[:-_CRC_BYTES]) != raw:
        raise ProtocolError("the beginning of a connection was corrupted on its way")
    if major != WIRE_VERSION[0]:
        raise Refusal(
            "version",
            f"the other peer speaks wire version {major}.{minor}, this one (p2pavg {__version__}) version "
            f"{WIRE_VERSION[0]}.{WIRE_VERSION[1]}; install the same p2pavg version everywhere",
        )
    if run != mine.run:
        raise Refusal("run", OTHER_RUN)
    if bool(closed) != mine.closed:
        raise Refusal(
            "credentials",
            "one of the two peers has credentials and the other has none; give both the credentials of the "
            "run, or neither"
            if mine.closed
            else "that run is closed, and this peer has no credentials of it; pass credentials=, or set "
            "P2PAVG_CREDENTIALS, with what its owner's `p2pavg credentials invite` made for you",
        )
    if kind not in (CONTROL, DATA, OBSERVE, TUNNEL):
        raise ProtocolError(f"a connection of unknown kind {kind}")
    return int(kind)


def pack(message: Mapping[str, Any]) -> bytes:
    """A head, and a msgpack body."""
    body: bytes = msgpack.packb(message if type(message) is dict else dict(message), use_bin_type=True)
    return make_head(len(body), zlib.crc32(body)) + body


def make_head(length: int, crc: int) -> bytes:
    """u32 length and CRC-32 of the body, and u32 CRC-32 of these eight bytes."""
    return _checked(_HEAD.pack(length, crc))


def _checked(raw: bytes) -> bytes:
    """The bytes, and their CRC-32."""
    return raw + zlib.crc32(raw).to_bytes(_CRC_BYTES, "little")


def parse_head(raw: bytes | bytearray | memoryview, limit: int) -> tuple[int, int]:
    """(length, CRC) of the body, from the HEAD_BYTES before it. Raises ProtocolError above `limit`."""
    length, crc = _HEAD.unpack_from(raw)
    if make_head(length, crc) != raw:
        raise ProtocolError("the head of a message was corrupted on its way")
    if length > limit:
        raise ProtocolError(f"a message of {length} bytes, more than {limit}")
    return length, crc


def check_body(body: bytes | bytearray | memoryview, crc: int) -> None:
    """Raises ProtocolError."""
    if zlib.crc32(body) != crc:
        raise ProtocolError("a message was corrupted on its way")


def unpack(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Raises ProtocolError unless it is a msgpack map with text keys.

    An array is allocated when its length is read: without a limit arrays within arrays, each said to be as
    long as the message, take a thousand times its bytes.
    """
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False, max_array_len=MOST_ITEMS)
    except Exception as error:
        raise ProtocolError("a message that is not msgpack") from error
    if type(message) is not dict or not {str}.issuperset(map(type, message)):
        raise ProtocolError("a message that is not a map")
    return message


def run_tag(run_id: str) -> bytes:
    return hashlib.sha256(run_id.encode()).digest()[:RUN_BYTES]


@dataclass(frozen=True, slots=True)
class Hello:
    """One side's description of itself; `facts` is the whole map, as it travels."""

    peer_id: bytes
    key: bytes
    run: bytes
    schema: bytes  # empty: the peer does not train, and fits every model
    port: int
    incarnation: int
    nonce: bytes
    token: bytes = field(repr=False)  # half of the link's secret
    facts: dict[str, Any] = field(repr=False)


def make_hello(
    identity: Identity, run_id: str, port: int, incarnation: int, facts: Mapping[str, Any]
) -> Hello:
    """facts: the facts of higher floors about this peer. Raises ConfigurationError when they are too long."""
    nonce, token = os.urandom(NONCE_BYTES), os.urandom(TOKEN_BYTES)
    schema = bytes(facts.get("schema", b""))
    whole = {
        **facts,
        "v": list(WIRE_VERSION),
        "run": run_tag(run_id),
        "peer": identity.peer_id,
        "key": identity.public_key,
        "port": port,
        "schema": schema,
        "incarnation": incarnation,
        "nonce": nonce,
        "token": token,
    }
    if len(pack(whole)) + _SIGNATURE_ROOM > MAX_HELLO_BYTES:
        raise ConfigurationError("what this peer tells about itself is longer than 4 KB; shorten its facts")
    return Hello(
        identity.peer_id,
        identity.public_key,
        run_tag(run_id),
        schema,
        port,
        incarnation,
        nonce,
        token,
        whole,
    )


def parse_hello(message: dict[str, Any]) -> Hello:
    """Raises Refusal: the message's own when it is a refusal, or "malformed"."""
    raise_refusal(message)
    hello = Hello(
        peer_id=_bytes(message, "peer", PEER_ID_BYTES),
        key=_bytes(message, "key", PUBLIC_KEY_BYTES),
        run=_bytes(message, "run", RUN_BYTES),
        schema=_bytes(message, "schema", SCHEMA_BYTES, 0),
        port=_integer(message, "port", 0xFFFF),
        incarnation=_integer(message, "incarnation", 2**63),
        nonce=_bytes(message, "nonce", NONCE_BYTES),
        token=_bytes(message, "token", TOKEN_BYTES),
        facts=message,
    )
    if peer_id_of(hello.key) != hello.peer_id:
        raise Refusal("malformed", "a peer's id is not the hash of its key")
    return hello


def minor_ahead(facts: Mapping[str, Any]) -> int:
    """By how many minor versions a peer with this hello is ahead: it may send messages unknown here.

    A negative number says by how many it is behind: it may not know messages sent from here.
    """
    version = facts.get("v")
    if not isinstance(version, list) or [type(number) for number in version] != [int, int]:
        return 0
    return int(version[1]) - WIRE_VERSION[1]


def raise_refusal(message: Mapping[str, Any]) -> None:
    code = message.get("refuse")
    if isinstance(code, str):
        why, since = message.get("why"), message.get("since")
        raise Refusal(
            code,
            printable(why) if isinstance(why, str) else "the other peer refuses without saying why",
            since if isinstance(since, int) and since > 0 else 0,
        )


def _bytes(message: Mapping[str, Any], name: str, *lengths: int) -> bytes:
    value = message.get(name)
    if not isinstance(value, bytes) or len(value) not in lengths:
        raise Refusal("malformed", f"a hello without a right {name!r}")
    return value


def _integer(message: Mapping[str, Any], name: str, most: int) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise Refusal("malformed", f"a hello without a right {name!r}")
    return value


def is_address(host: object, port: object) -> bool:
    """Whether host and port are an IP address and a TCP port."""
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 65536:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_key(theirs: Hello, proven: bytes | None) -> None:
    """proven: the key of the other side's certificate, None without TLS.

    Raises Refusal when the hello names another key.
    """
    if proven is not None and proven != theirs.key:
        raise Refusal(
            "credentials", "a peer's certificate is for another key than it claims; make new credentials"
        )


def check(mine: Hello, theirs: Hello, expect: bytes | None = None) -> None:
    """Raises Refusal when the two do not belong together. expect: the peer id that the dialler looks for."""
    if theirs.peer_id == mine.peer_id and theirs.incarnation == mine.incarnation:
        raise Refusal("self", "that address is this peer's own; name another member of the run")
    if theirs.peer_id == mine.peer_id:
        raise Refusal(
            "duplicate",
            f"another process uses the identity of peer {short_id(mine.peer_id)}; {OWN_IDENTITY}",
        )
    if theirs.run != mine.run:
        raise Refusal("run", OTHER_RUN)
    if expect is not None and theirs.peer_id != expect:
        raise Refusal("identity", f"peer {short_id(expect)} is no longer at that address")
    if mine.schema and theirs.schema:
        _check_training(mine, theirs)


def _check_training(mine: Hello, theirs: Hello) -> None:
    ours, others = _terms(mine.facts), _terms(theirs.facts)
    me, them = short_id(mine.peer_id), short_id(theirs.peer_id)
    told = ", ".join(
        f"{name} is {ours[name]} at peer {me} and {printable(str(others[name]))} at peer {them}"
        for name in sorted(ours.keys() & others.keys())
        if ours[name] != others[name]
    )
    if mine.schema != theirs.schema:
        lines = [outline.unpack(side.facts.get("outline")) for side in (mine, theirs)]
        first = outline.first_difference(lines[0], lines[1], me, them)
        told = ", ".join(filter(None, [told, first]))
        raise Refusal(
            "model",
            "two peers of this run train different models or optimizers"
            + (f" ({told})" if told else "")
            + "; start all with the same ones, or use another run_id",
        )
    if told:
        raise Refusal("terms", f"two peers of this run disagree: {told}; start all with the same values")


def _terms(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    terms = facts.get("terms")
    return terms if isinstance(terms, dict) else {}
