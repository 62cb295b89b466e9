"""The store of a node: records that it knows, from whomever; bounded, expiring, and never going backwards."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from p2pavg.membership.table.address import Address
from p2pavg.membership.table.record import Refresh, SignedRecord, has_valid_signature
from p2pavg.membership.table.records.entries import (
    DIGEST_BYTES,
    PREFIX_BYTES,
    Entry,
    Outcome,
    StoredRecord,
    digest_of,
)
from p2pavg.membership.table.records.shares import Shares
from p2pavg.networks import network_of

MAX_RECORDS = 16384
MAX_RECORDS_PER_KEY = 8192
TOMBSTONE_SECONDS = 600.0
LOOK_SECONDS = 1.0  # between two looks of a full store for what has expired


class _Key:
    """The records under one key, also in the order of their prefixes for paging."""

    def __init__(self) -> None:
        self.held: dict[bytes, StoredRecord] = {}
        self.order: list[bytes] = []
        self.shares = Shares()
        self.watchers: list[Callable[[StoredRecord], None]] = []
        self.vet: Callable[[SignedRecord], bool] = lambda record: True


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
        self._shares = Shares()

    def __len__(self) -> int:
        return self._count

    def watch(
        self,
        key: bytes,
        callback: Callable[[StoredRecord], None],
        vet: Callable[[SignedRecord], bool] = lambda record: True,
    ) -> Callable[[], None]:
        """Call back on every new version and refresh under `key`; returns the function that ends it.

        vet: which records are taken under it from now on.
        """
        entry = self._keys.setdefault(key, _Key())
        entry.watchers.append(callback)
        entry.vet = vet
        return lambda: self._unwatch(key, callback)

    def _unwatch(self, key: bytes, callback: Callable[[StoredRecord], None]) -> None:
        entry = self._keys[key]
        entry.watchers.remove(callback)
        entry.vet = lambda record: True

    def is_watched(self, key: bytes) -> bool:
        entry = self._keys.get(key)
        return entry is not None and bool(entry.watchers)

    def lookup(self, key: bytes, prefix: bytes) -> StoredRecord | None:
        """What is held of the peer whose id starts with `prefix`, tombstones included."""
        entry = self._keys.get(key)
        return entry.held.get(prefix) if entry else None

    def live(self, key: bytes, now: float) -> list[StoredRecord]:
        """The unexpired records under `key`."""
        entry = self._keys.get(key)
        return [h for h in entry.held.values() if h.expires > now] if entry else []

    def summary(self, key: bytes, now: float) -> tuple[int, bytes]:
        """How many records others are told of under `key`, and a digest of which versions of whose."""
        live = [held for held in self.live(key, now) if held.is_served]
        combined = 0
        for held in live:
            combined ^= held.digest
        return len(live), combined.to_bytes(DIGEST_BYTES, "big")

    def page(self, key: bytes, cursor: bytes, limit: int, now: float) -> tuple[list[Entry], bytes]:
        """Up to `limit` index entries of what others are told after `cursor`, and the next cursor (empty at
        the end).
        """
        entry = self._keys.get(key)
        if entry is None:
            return [], b""
        found: list[Entry] = []
        for index in range(bisect.bisect_right(entry.order, cursor), len(entry.order)):
            prefix = entry.order[index]
            held = entry.held[prefix]
            if held.expires <= now or not held.is_served:
                continue
            if len(found) == limit:
                return found, found[-1].prefix
            found.append(held.as_entry(now))
        return found, b""

    def offer(
        self,
        record: SignedRecord,
        refresh: Refresh,
        remaining: float,
        now: float,
        *,
        proved_at: Address | None = None,
        told_at: Address | None = None,
        told_by: bytes = b"",
        own: bool = False,
    ) -> Outcome:
        """Take a record from anybody. It is kept when it is newer than what is held and properly signed, and
        what watches the key takes it.

        `remaining` is what the sender says is left of its lifetime; never more than the signed lifetime is
        believed. proved_at: where its publisher, from whom it comes, has proven itself.
        """
        entry = self._keys.get(record.key)
        prefix = record.peer_id[:PREFIX_BYTES]
        held = entry.held.get(prefix) if entry else None
        if held is not None and held.record.version >= record.version:
            if held.record.version > record.version or held.record.encoded != record.encoded:
                return Outcome.STALE
            return self._again(held, refresh, remaining, now, proved_at, told_at, told_by)
        start = Refresh(0, record.anchor)
        if refresh != start and not record.accepts(start, refresh):
            return Outcome.REFUSED
        if entry is not None and not entry.vet(record):
            return Outcome.FOREIGN
        if not has_valid_signature(record):
            return Outcome.REFUSED
        network = "" if proved_at is None else network_of(proved_at[0])
        if held is None and not self._make_room(record.key, network, now):
            return Outcome.REFUSED
        entry = self._keys.setdefault(record.key, _Key())
        if held is None:
            bisect.insort(entry.order, prefix)
            self._count += 1
        else:
            self._give_back(record.key, entry, held)
            if held.expires > now:
                proved_at = proved_at or held.proved_at  # who was there a version ago
        expires = now + min(remaining, record.lifetime)
        digest = digest_of(record)
        tellers = {} if told_at is None else {told_by: None}
        fresh = StoredRecord(record, refresh, now, expires, digest, proved_at, told_at, tellers, own)
        entry.held[prefix] = fresh
        self._take(record.key, entry, fresh)
        self._tell(entry, fresh)
        return Outcome.NEW

    def prove(self, held: StoredRecord, proved_at: Address) -> None:
        """The publisher of a record has proven itself, at this address."""
        entry = self._keys.get(held.record.key)
        if entry is not None and entry.held.get(held.record.peer_id[:PREFIX_BYTES]) is held:
            self._give_back(held.record.key, entry, held)
            held.proved_at = proved_at
            self._take(held.record.key, entry, held)
            self._tell(entry, held)

    def vouch(self, key: bytes, prefix: bytes, version: tuple[int, int], teller: bytes) -> None:
        """Another node lists this version of a record, as only a node does that has its publisher's proof."""
        held = self.lookup(key, prefix)
        if held is None or held.proved_at is not None or held.record.version != version:
            return
        if held.add_teller(teller):
            self._tell(self._keys[key], held)

    def _again(
        self,
        held: StoredRecord,
        refresh: Refresh,
        remaining: float,
        now: float,
        proved_at: Address | None,
        told_at: Address | None,
        told_by: bytes,
    ) -> Outcome:
        """A version that is held already came once more."""
        expired = held.expires <= now
        outcome = self._refresh(held.record.key, held, refresh, remaining, now, again=True)
        if expired and outcome is Outcome.REFRESHED:
            held.proved_at = None  # it may be a replay: its publisher proves itself anew
            held.tellers.clear()  # what they said was of its life before
        if told_at is not None and outcome in (Outcome.KNOWN, Outcome.REFRESHED):
            held.told_at = told_at
            held.add_teller(told_by)
        if outcome is Outcome.REFUSED or outcome is Outcome.STALE:
            return outcome
        if proved_at is not None and held.proved_at != proved_at:
            self.prove(held, proved_at)
        elif outcome is Outcome.REFRESHED or told_at is not None:
            self._tell(self._keys[held.record.key], held)
        return outcome

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
        if held is None or held.record.version < version or held.expires <= now:
            return Outcome.UNKNOWN
        if held.record.version > version:
            return Outcome.STALE
        return self._refresh(key, held, refresh, remaining, now)

    def _refresh(
        self,
        key: bytes,
        held: StoredRecord,
        refresh: Refresh,
        remaining: float,
        now: float,
        *,
        again: bool = False,
    ) -> Outcome:
        """again: the caller tells the watchers."""
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
        if not again:
            self._tell(self._keys[key], held)
        return Outcome.REFRESHED

    def _tell(self, entry: _Key, held: StoredRecord) -> None:
        for watcher in tuple(entry.watchers):
            watcher(held)

    # room

    def _take(self, key: bytes, entry: _Key, held: StoredRecord) -> None:
        place = (key, held.record.peer_id[:PREFIX_BYTES])
        network = _network_of(held)
        entry.shares.add(network, place)
        self._shares.add(network, place)

    def _give_back(self, key: bytes, entry: _Key, held: StoredRecord) -> None:
        place = (key, held.record.peer_id[:PREFIX_BYTES])
        network = _network_of(held)
        entry.shares.remove(network, place)
        self._shares.remove(network, place)

    def _make_room(self, key: bytes, network: str, now: float) -> bool:
        """Whether there is a place for a record from `network`. When all are taken, the network that has most
        loses one: so whoever fills a key from one place keeps nobody out of it.
        """
        if self._has_room(key):
            return True
        if now >= self._look_again_at:
            self._look_again_at = now + LOOK_SECONDS
            self.purge(now, tombstone_seconds=0.0)
        while not self._has_room(key):
            entry = self._keys.get(key)
            of_key = entry is not None and len(entry.held) >= self._max_records_per_key
            shares = entry.shares if entry is not None and of_key else self._shares
            place = shares.oldest_of_largest(network)
            if place is None:
                return False
            self._drop(*place)
        return True

    def _has_room(self, key: bytes) -> bool:
        entry = self._keys.get(key)
        return self._count < self._max_records and (
            entry is None or len(entry.held) < self._max_records_per_key
        )

    def _drop(self, key: bytes, prefix: bytes) -> None:
        entry = self._keys[key]
        self._give_back(key, entry, entry.held.pop(prefix))
        del entry.order[bisect.bisect_left(entry.order, prefix)]
        self._count -= 1
        if not entry.held and not entry.watchers:
            del self._keys[key]

    def purge(self, now: float, *, tombstone_seconds: float = TOMBSTONE_SECONDS) -> None:
        """Forget what expired more than `tombstone_seconds` ago."""
        for key, entry in list(self._keys.items()):
            gone = {p for p, h in entry.held.items() if h.expires + tombstone_seconds <= now}
            if gone:
                for prefix in gone:
                    self._give_back(key, entry, entry.held.pop(prefix))
                entry.order = [p for p in entry.order if p not in gone]
                self._count -= len(gone)
            if not entry.held and not entry.watchers:
                del self._keys[key]

    def keys(self) -> Iterator[bytes]:
        return iter(tuple(self._keys))


def _network_of(held: StoredRecord) -> str:
    return "" if held.proved_at is None else network_of(held.proved_at[0])
