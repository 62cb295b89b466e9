"""Datagrams of the DHT: a fixed header, a msgpack body, and, when asked for, a proof of who answers.

```
0  2s magic "pD"   2 u8 version   3 u8 kind   4 u8 flags   5 8s transaction   13 20s sender's id
33 8s token   41 u16 body length
43 body, then in a request with flag PROVE the address that it is sent to (18 bytes), then the proof (32-byte
   public key, 64-byte signature) when flag PROOF is set, then padding (ignored)
```
No datagram is longer than `MAX_DATAGRAM` bytes. The token in an answer proves, when a later request repeats
it, that its sender receives at the address it sends from. To anybody else an answer has at most
`AMPLIFICATION` times the bytes of the request, so first requests are padded. A node that has too many such
requests answers with a token alone (flag COOKIE): whoever repeats the request with it is served.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from p2pavg.identity import PEER_ID_BYTES, PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from p2pavg.membership.table.address import PACKED_ADDRESS_BYTES, Address, pack_address, unpack_address

VERSION = 1
MAX_DATAGRAM = 1200
TRANSACTION_BYTES = 8
TOKEN_BYTES = 8
NO_TOKEN = bytes(TOKEN_BYTES)
PROOF_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES
_MAGIC = b"pD"
_PROOF_DOMAIN = b"p2pavg dht proof"
_HEADER = struct.Struct(f">2sBBB{TRANSACTION_BYTES}s{PEER_ID_BYTES}s{TOKEN_BYTES}sH")
HEADER_BYTES = _HEADER.size
FLAGS_OFFSET = 4
TOKEN_OFFSET = 33
LENGTH_OFFSET = 41
TRY_SHIFT = 4
MAX_BODY = MAX_DATAGRAM - HEADER_BYTES - PROOF_BYTES
MALFORMED = (ValueError, msgpack.UnpackException)  # all that msgpack raises for bytes that it cannot read
PING_BYTES = HEADER_BYTES + 1 + PACKED_ADDRESS_BYTES  # that asks for a proof
CONTACT_BYTES = PEER_ID_BYTES + PACKED_ADDRESS_BYTES


class RequestKind(enum.IntEnum):
    """What a request asks for. An answer has the same kind and flag ANSWER."""

    PING = 1
    FIND = 2
    INDEX = 3
    FETCH = 4
    STORE = 5
    REFRESH = 6
    ENTRIES = 7
    DIAL = 8
    REVOKED = 9


class Flag:
    """Bits of a message's flags (plain ints: enum arithmetic is too slow for every datagram)."""

    ANSWER = 1
    CLIENT_ONLY = 2  # the sender answers no requests: do not list it as a contact
    PROVE = 4  # the request wants a proof of the answerer's identity
    PROOF = 8  # the answer carries one
    COOKIE = 0x40  # the answer is a token alone: ask again with it
    TRY = 0x30  # which try of the request this is, 0 to 3; the answer says which it answers


@dataclass(frozen=True, slots=True)
class Contact:
    """A node's id and the address where it answers."""

    id: bytes
    address: Address

    @property
    def long_id(self) -> int:
        return int.from_bytes(self.id, "big")


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    flags: int
    transaction: bytes
    sender: bytes
    token: bytes
    body: list[Any]
    proof: bytes = b""
    asked: bytes = b""  # the packed address that a request with flag PROVE was sent to
    packed: bytes = b""  # the body as it travelled
    size: int = 0  # bytes of the whole datagram

    def to_prove(self, asked: bytes, asker: bytes) -> bytes:
        """What whoever answers `asker`, who asked at the packed address `asked`, signs."""
        return b"\0".join((_PROOF_DOMAIN, self.transaction, asker, asked, self.packed))


class Head(NamedTuple):
    """What a datagram says before its body, which costs nearly nothing to read."""

    kind: int
    flags: int
    transaction: bytes
    sender: bytes
    token: bytes


def encode(
    kind: int,
    flags: int,
    transaction: bytes,
    sender: bytes,
    token: bytes,
    body: list[Any],
    *,
    asked: bytes = b"",
    proof: bytes = b"",
    pad_to: int = 0,
) -> bytes:
    """One datagram. Raises ValueError when it would be longer than `MAX_DATAGRAM`."""
    packed: bytes = msgpack.packb(body)
    head = _HEADER.pack(_MAGIC, VERSION, kind, flags, transaction, sender, token, len(packed))
    data = head + packed + asked + proof
    if len(data) > MAX_DATAGRAM:
        raise ValueError(f"a datagram of {len(data)} bytes would be fragmented")
    return data.ljust(pad_to, b"\x00")


def read_head(data: bytes) -> Head | None:
    """The head of a datagram, or None when no correct node sends such bytes."""
    if not HEADER_BYTES < len(data) <= MAX_DATAGRAM:
        return None
    magic, version, kind, flags, transaction, sender, token, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION or len(data) < HEADER_BYTES + length:
        return None
    return Head(kind, flags, transaction, sender, token)


def decode(data: bytes, head: Head | None = None) -> Message | None:
    """The message in a datagram, or None when no correct node sends such bytes. head: when it was read."""
    head = head or read_head(data)
    if head is None:
        return None
    end = HEADER_BYTES + int.from_bytes(data[LENGTH_OFFSET:HEADER_BYTES], "big")
    packed, flags = data[HEADER_BYTES:end], head.flags
    proves, proven = flags & Flag.PROVE and not flags & Flag.ANSWER, flags & Flag.PROOF
    asked = data[end : end + PACKED_ADDRESS_BYTES] if proves else b""
    end += len(asked)
    proof = data[end : end + PROOF_BYTES] if proven else b""
    if (proves and len(asked) != PACKED_ADDRESS_BYTES) or (proven and len(proof) != PROOF_BYTES):
        return None
    try:
        body = msgpack.unpackb(packed)
    except MALFORMED:
        return None
    if not isinstance(body, list):
        return None
    return Message(*head, body, proof, asked, packed, len(data))


NOTICE = _MAGIC + bytes([VERSION])
"""What a node answers to a datagram of another version: shorter than any message, so nobody answers it."""


def other_version(data: bytes) -> int | None:
    """The version of a message or notice of another version than ours; None for everything else."""
    if len(data) < len(NOTICE) or data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC)] == VERSION:
        return None
    return data[len(_MAGIC)]


def matches(body: list[Any], *shape: type) -> bool:
    """Whether a body has exactly these types (bool does not count as int)."""
    return len(body) == len(shape) and all(type(item) is kind for item, kind in zip(body, shape, strict=True))


def pack_contacts(contacts: list[Contact]) -> bytes:
    return b"".join(c.id + pack_address(c.address) for c in contacts)


def unpack_contacts(data: bytes, limit: int) -> list[Contact] | None:
    """Up to `limit` contacts; None when the bytes are no whole number of them. Impossible addresses are
    skipped.
    """
    if len(data) % CONTACT_BYTES or len(data) > limit * CONTACT_BYTES:
        return None
    contacts = []
    for at in range(0, len(data), CONTACT_BYTES):
        address = unpack_address(data[at + PEER_ID_BYTES : at + CONTACT_BYTES])
        if address is not None:
            contacts.append(Contact(data[at : at + PEER_ID_BYTES], address))
    return contacts
