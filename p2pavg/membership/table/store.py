"""The records that this node knows, whoever told it: bounded, expiring, and never going backwards."""

from __future__ import annotations

import bisect
import enum
import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from p2pavg.membership.table.record import LINK_BYTES, Record, Refresh, SignedRecord, has_valid_signature

PREFIX_BYTES = 8
DIGEST_BYTES = 8
MAX_RECORDS = 16384
MAX_RECORDS_PER_KEY = 8192
TOMBSTONE_SECONDS = 600.0
LOOK_SECONDS = 1.0  # between two looks of a full store for what has expired

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


@dataclass(slots=True)
class Held:
    """A record as held: after `expires` it is a tombstone that keeps replays of it from coming back to
    life.
    """

    record: SignedRecord
    refresh: Refresh
    refreshed: float
    expires: float
    digest: int

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


def _digest_of(record: SignedRecord) -> int:
    named = struct.pack(">20sQI", record.peer_id, record.incarnation, record.sequence)
    return int.from_bytes(hashlib.blake2b(named, digest_size=DIGEST_BYTES).digest(), "big")


class _Key:
    """The records under one key, also in the order of their prefixes for paging."""

    def __init__(self) -> None:
        self.held: dict[bytes, Held] = {}
        self.order: list[bytes] = []
        self.watchers: list[Callable[[Held], None]] = []


class RecordStore:
    """All times are the caller's monotonic clock, in seconds."""

    def __init__(
        self, *, max_records: int = MAX_RECORDS, max_records_per_key: int = MAX_RECORDS_PER_KEY
    ) -> None:
        self._keys: dict[bytes, _Key] = {}
        self._max_records = max_records
        self._max_records_per_key = max_records_per_key
        self._count = 0
        self._look_again_at = float("-inf")

    def __len__(self) -> int:
        return self._count

    def watch(self, key: bytes, callback: Callable[[Held], None]) -> Callable[[], None]:
        """Call back on every new version and refresh under `key`; returns the function that ends it."""
        watchers = self._keys.setdefault(key, _Key()).watchers
        watchers.append(callback)
        return lambda: watchers.remove(callback)

    def is_watched(self, key: bytes) -> bool:
        entry = self._keys.get(key)
        return entry is not None and bool(entry.watchers)

    def lookup(self, key: bytes, prefix: bytes) -> Held | None:
        """What is held of the peer whose id starts with `prefix`, tombstones included."""
        entry = self._keys.get(key)
        return entry.held.get(prefix) if entry else None

    def live(self, key: bytes, now: float) -> list[Held]:
        """The unexpired records under `key`."""
        entry = self._keys.get(key)
        return [h for h in entry.held.values() if h.expires > now] if entry else []

    def summary(self, key: bytes, now: float) -> tuple[int, bytes]:
        """How many unexpired records there are under `key`, and a digest of which versions of whose."""
        live = self.live(key, now)
        combined = 0
        for held in live:
            combined ^= held.digest
        return len(live), combined.to_bytes(DIGEST_BYTES, "big")

    def page(self, key: bytes, cursor: bytes, limit: int, now: float) -> tuple[list[Entry], bytes]:
        """Up to `limit` index entries of unexpired records after `cursor`, and the next cursor (empty at
        the end).
        """
        entry = self._keys.get(key)
        if entry is None:
            return [], b""
        found: list[Entry] = []
        for index in range(bisect.bisect_right(entry.order, cursor), len(entry.order)):
            prefix = entry.order[index]
            held = entry.held[prefix]
            if held.expires <= now:
                continue
            if len(found) == limit:
                return found, found[-1].prefix
            found.append(held.as_entry(now))
        return found, b""

    def offer(self, record: SignedRecord, refresh: Refresh, remaining: float, now: float) -> Outcome:
        """Take a record from anybody. It is kept when it is newer than what is held and properly signed.

        `remaining` is what the sender says is left of its lifetime; never more than the signed lifetime is
        believed.
        """
        entry = self._keys.get(record.key)
        prefix = record.peer_id[:PREFIX_BYTES]
        held = entry.held.get(prefix) if entry else None
        if held is not None and held.record.version >= record.version:
            if held.record.version > record.version or held.record.encoded != record.encoded:
                return Outcome.STALE
            return self._refresh(record.key, held, refresh, remaining, now)
        if held is None and not self._make_room(record.key, now):
            return Outcome.REFUSED
        start = Refresh(0, record.anchor)
        if refresh != start and not record.accepts(start, refresh):
            return Outcome.REFUSED
        if not has_valid_signature(record):
            return Outcome.REFUSED
        entry = self._keys.setdefault(record.key, _Key())
        if held is None:
            bisect.insort(entry.order, prefix)
            self._count += 1
        expires = now + min(remaining, record.lifetime)
        fresh = Held(record, refresh, now, expires, _digest_of(record))
        entry.held[prefix] = fresh
        for watcher in tuple(entry.watchers):
            watcher(fresh)
        return Outcome.NEW

    def refresh(
        self,
        key: bytes,
        prefix: bytes,
        version: tuple[int, int],
        refresh: Refresh,
        remaining: float,
        now: float,
    ) -> Outcome:
        """Extend a held record by a later link of its chain. UNKNOWN when this version of it is not held."""
        held = self.lookup(key, prefix)
        if held is None or held.record.version < version:
            return Outcome.UNKNOWN
        if held.record.version > version:
            return Outcome.STALE
        return self._refresh(key, held, refresh, remaining, now)

    def _refresh(self, key: bytes, held: Held, refresh: Refresh, remaining: float, now: float) -> Outcome:
        if refresh.step < held.refresh.step:
            return Outcome.STALE
        lifetime = held.record.lifetime
        if refresh.step == held.refresh.step:
            # Another holder may know better how long this same refresh is still good for; never beyond its
            # lifetime.
            if refresh.link == held.refresh.link:
                held.expires = max(held.expires, min(now + remaining, held.refreshed + lifetime))
            return Outcome.KNOWN
        if not held.record.accepts(held.refresh, refresh):
            return Outcome.REFUSED
        held.refresh = refresh
        held.refreshed = now
        held.expires = now + min(remaining, lifetime)
        for watcher in tuple(self._keys[key].watchers):
            watcher(held)
        return Outcome.REFRESHED

    def _make_room(self, key: bytes, now: float) -> bool:
        entry = self._keys.get(key)
        full = self._count >= self._max_records or (entry and len(entry.held) >= self._max_records_per_key)
        if full and now >= self._look_again_at:
            self._look_again_at = now + LOOK_SECONDS
            self.purge(now, tombstone_seconds=0.0)
            entry = self._keys.get(key)
        return self._count < self._max_records and (
            entry is None or len(entry.held) < self._max_records_per_key
        )

    def purge(self, now: float, *, tombstone_seconds: float = TOMBSTONE_SECONDS) -> None:
        """Forget what expired more than `tombstone_seconds` ago."""
        for key, entry in list(self._keys.items()):
            gone = {p for p, h in entry.held.items() if h.expires + tombstone_seconds <= now}
            if gone:
                for prefix in gone:
                    del entry.held[prefix]
                entry.order = [p for p in entry.order if p not in gone]
                self._count -= len(gone)
            if not entry.held and not entry.watchers:
                del self._keys[key]

    def keys(self) -> Iterator[bytes]:
        return iter(tuple(self._keys))
