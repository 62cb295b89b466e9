"""Signed, expiring records: what a peer says about itself under a key, and who may say or extend it.

A record is ordered by (incarnation, sequence). Its lifetime counts from the moment that a holder received it,
on the holder's own monotonic clock, so nobody's wall clock matters. Its publisher extends it without signing
again: the record holds the end of a hash chain, and each refresh reveals the next link (`Refresh`), ten bytes
that only the publisher knows.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from typing import NamedTuple

from p2pavg.identity import Identity, peer_id_of, verify

KEY_BYTES = 20
LINK_BYTES = 10
CHAIN_LENGTH = 255
MAX_VALUE_BYTES = 840
MAX_LIFETIME = 300.0
MIN_LIFETIME = 0.1
MAX_INCARNATION = 2**48 - 1

_HEAD = struct.Struct(
    f">B20s32sQII{LINK_BYTES}sH"
)  # version, key, public key, incarnation, sequence, lifetime ms, anchor, length
_VERSION = 1
_DOMAIN = b"p2pavg record\x00"
MAX_RECORD_BYTES = _HEAD.size + MAX_VALUE_BYTES + 64


def key_of(*parts: bytes | str) -> bytes:
    """The 20-byte key that a name, given in parts, has in the table."""
    digest = hashlib.sha256(b"p2pavg key")
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(4, "big") + raw)
    return digest.digest()[:KEY_BYTES]


class Refresh(NamedTuple):
    """The latest proof that a record's publisher still stands by it: link `step` of the record's chain."""

    step: int
    link: bytes


def _next_link(link: bytes) -> bytes:
    return hashlib.sha256(b"p2pavg chain\x00" + link).digest()[:LINK_BYTES]


class Chain:
    """The publisher's side of a hash chain: `links[0]` is the public anchor, later links are revealed one
    by one.
    """

    def __init__(self) -> None:
        links = [os.urandom(LINK_BYTES)]
        for _ in range(CHAIN_LENGTH):
            links.append(_next_link(links[-1]))
        self._links = links[::-1]
        self._step = 0

    @property
    def anchor(self) -> bytes:
        return self._links[0]

    @property
    def last(self) -> Refresh:
        """The newest revealed link."""
        return Refresh(self._step, self._links[self._step])

    def reveal(self) -> Refresh | None:
        """The next link, or None when the chain is used up and the record must be signed again."""
        if self._step == CHAIN_LENGTH:
            return None
        self._step += 1
        return self.last


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record as its publisher signed it. `encoded` is all of it as it travels, with the signature."""

    key: bytes
    public_key: bytes
    peer_id: bytes
    incarnation: int
    sequence: int
    lifetime: float
    anchor: bytes
    value: bytes
    encoded: bytes

    @property
    def version(self) -> tuple[int, int]:
        return self.incarnation, self.sequence

    def accepts(self, known: Refresh, refresh: Refresh) -> bool:
        """Whether `refresh` is a later link of this record's chain than `known` (at most 255 hashes)."""
        steps = refresh.step - known.step
        if steps <= 0 or refresh.step > CHAIN_LENGTH or len(refresh.link) != LINK_BYTES:
            return False
        link = refresh.link
        for _ in range(steps):
            link = _next_link(link)
        return link == known.link


def sign_record(
    identity: Identity,
    key: bytes,
    value: bytes,
    *,
    incarnation: int,
    sequence: int,
    lifetime: float,
    anchor: bytes,
) -> SignedRecord:
    """Make and sign a record. `lifetime` is in seconds and is clipped to [0.1, 300]; `value` is at most
    840 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a record's value has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")
    milliseconds = int(min(max(lifetime, MIN_LIFETIME), MAX_LIFETIME) * 1000)
    head = _HEAD.pack(
        _VERSION, key, identity.public_key, incarnation, sequence, milliseconds, anchor, len(value)
    )
    body = head + value
    encoded = body + identity.sign(_DOMAIN + body)
    return SignedRecord(
        key,
        identity.public_key,
        identity.peer_id,
        incarnation,
        sequence,
        milliseconds / 1000,
        anchor,
        value,
        encoded,
    )


def parse_record(encoded: bytes) -> SignedRecord | None:
    """Decode a record without checking its signature; None when it is malformed."""
    if not _HEAD.size + 64 <= len(encoded) <= MAX_RECORD_BYTES:
        return None
    version, key, public_key, incarnation, sequence, milliseconds, anchor, length = _HEAD.unpack_from(encoded)
    if version != _VERSION or len(encoded) != _HEAD.size + length + 64:
        return None
    lifetime = milliseconds / 1000
    if not MIN_LIFETIME <= lifetime <= MAX_LIFETIME or incarnation > MAX_INCARNATION:
        return None
    value = bytes(encoded[_HEAD.size : _HEAD.size + length])
    return SignedRecord(
        key,
        public_key,
        peer_id_of(public_key),
        incarnation,
        sequence,
        lifetime,
        anchor,
        value,
        bytes(encoded),
    )


def to_store(holder: bytes, token: bytes, key: bytes) -> bytes:
    """What the publisher of a record signs for a holder, so that nobody else brings it there. token: what the
    holder gave to the publisher's address.
    """
    return b"p2pavg store\0" + holder + token + key


def has_valid_signature(record: SignedRecord) -> bool:
    """Whether the record was signed by the key that it names."""
    return verify(record.public_key, _DOMAIN + record.encoded[:-64], record.encoded[-64:])


@dataclass(frozen=True, slots=True)
class Record:
    """One peer's newest verified record under a key, as `DHT.get` returns it. `remaining` is in seconds."""

    peer_id: bytes
    public_key: bytes
    value: bytes
    remaining: float
    incarnation: int
    sequence: int
    step: int
