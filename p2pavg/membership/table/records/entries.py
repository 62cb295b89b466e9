"""Stored records, entries by which nodes compare what they store, and the outcomes of offering one."""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from p2pavg.membership.table.address import Address
from p2pavg.membership.table.record import LINK_BYTES, Record, Refresh, SignedRecord

PREFIX_BYTES = 8
DIGEST_BYTES = 8
MAX_TELLERS = 32  # of one record

_ENTRY = struct.Struct(f">{PREFIX_BYTES}sHIIB{LINK_BYTES}sH")
ENTRY_BYTES = _ENTRY.size


class Outcome(enum.IntEnum):
    """What became of a record that was offered to a store."""

    NEW = 0
    REFRESHED = 1
    KNOWN = 2
    STALE = 3
    UNKNOWN = 4
    REFUSED = 5
    FOREIGN = 6


@dataclass(slots=True)
class StoredRecord:
    """A record in a store. After `expires` it is a tombstone that keeps replays of it from coming back to
    life. `proved_at` is where its publisher has proven itself to this node, `told_at` where another node says
    that it has to that node, and `tellers` (the latest ones) are all that say so.
    """

    record: SignedRecord
    refresh: Refresh
    refreshed: float
    expires: float
    digest: int
    proved_at: Address | None = None
    told_at: Address | None = None
    tellers: dict[bytes, None] = field(default_factory=dict)
    own: bool = False

    @property
    def is_served(self) -> bool:
        """Whether others are told of it: what nobody has proven here goes no further."""
        return self.own or self.proved_at is not None

    def add_teller(self, peer_id: bytes) -> bool:
        """Note that another node has the publisher's proof, or says so; whether it had not said so before."""
        if peer_id in self.tellers:
            return False
        if len(self.tellers) >= MAX_TELLERS:
            del self.tellers[next(iter(self.tellers))]
        self.tellers[peer_id] = None
        return True

    def as_entry(self, now: float) -> Entry:
        r = self.record
        return Entry(r.peer_id[:PREFIX_BYTES], r.incarnation, r.sequence, self.refresh, self.expires - now)

    def as_record(self, now: float) -> Record:
        r = self.record
        return Record(
            r.peer_id,
            r.public_key,
            r.value,
            self.expires - now,
            r.incarnation,
            r.sequence,
            self.refresh.step,
        )


class Entry(NamedTuple):
    """One line of a key's index: which version of whose record, its newest refresh, seconds left."""

    prefix: bytes
    incarnation: int
    sequence: int
    refresh: Refresh
    remaining: float

    @property
    def version(self) -> tuple[int, int]:
        return self.incarnation, self.sequence

    def encode(self) -> bytes:
        return _ENTRY.pack(
            self.prefix,
            self.incarnation >> 32,
            self.incarnation & 0xFFFFFFFF,
            self.sequence,
            self.refresh.step,
            self.refresh.link,
            min(65535, max(0, int(self.remaining * 100))),
        )


def decode_entries(data: bytes) -> list[Entry] | None:
    """The entries packed into `data`, or None when it is no whole number of them."""
    if len(data) % ENTRY_BYTES:
        return None
    return [
        Entry(prefix, high << 32 | low, sequence, Refresh(step, link), centiseconds / 100)
        for prefix, high, low, sequence, step, link, centiseconds in _ENTRY.iter_unpack(data)
    ]


def digest_of(record: SignedRecord) -> int:
    named = struct.pack(">20sQI", record.peer_id, record.incarnation, record.sequence)
    return int.from_bytes(hashlib.blake2b(named, digest_size=DIGEST_BYTES).digest(), "big")
