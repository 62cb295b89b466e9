"""Answers about the records that a node stores: which they are, what they hold, and whether one is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pavg.identity import Identity, verify
from p2pavg.membership.table.address import Address, pack_address
from p2pavg.membership.table.ledger import AddressLedger
from p2pavg.membership.table.record import MAX_LIFETIME, Refresh, parse_record, to_store
from p2pavg.membership.table.records.entries import ENTRY_BYTES, PREFIX_BYTES, Outcome
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.membership.table.routing import Contacts


class RecordAnswers:
    """What a node answers to who reads from its store, compares with it, or publishes there."""

    def __init__(
        self,
        identity: Identity,
        store: RecordStore,
        contacts: Contacts,
        k: int,
        ledger: AddressLedger,
        token_for: Callable[[Address], bytes],
        clock: Callable[[], float],
    ) -> None:
        """k: how many nodes hold each record. token_for: what only who receives at an address can show."""
        self._identity = identity
        self._store = store
        self._contacts = contacts
        self._k = k
        self._ledger = ledger
        self._token_for = token_for
        self._clock = clock

    def index(self, key: bytes, cursor: bytes, known: bytes, room: int) -> list[Any] | None:
        """The entries of a key from `cursor` on, unless the asker knows them by their digest.

        None: not one fits `room` bytes.
        """
        limit = room // ENTRY_BYTES
        if limit <= 0:
            return None
        now = self._clock()
        count, digest = self._store.summary(key, now)
        entries, following = self._store.page(key, cursor, limit, now) if known != digest else ([], b"")
        return [b"".join(entry.encode() for entry in entries), following, count, digest]

    def refresh(
        self, key: bytes, prefix: bytes, incarnation: int, sequence: int, step: int, link: bytes
    ) -> list[Any]:
        """Lengthen the life of a record by the next link of its chain."""
        version, refresh = (incarnation, sequence), Refresh(step, link)
        return [int(self._store.refresh(key, prefix, version, refresh, MAX_LIFETIME, self._clock()))]

    def entries(self, key: bytes, prefixes: bytes) -> bytes:
        """The entries of the named records that are stored and served."""
        now = self._clock()
        parts = (prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES))
        found = (self._store.lookup(key, prefix) for prefix in parts)
        return b"".join(
            held.as_entry(now).encode() for held in found if held and held.expires > now and held.is_served
        )

    def fetch(self, key: bytes, prefixes: bytes, room: int) -> list[Any]:
        """The named records, as many as fit `room` bytes."""
        now = self._clock()
        found: list[Any] = []
        prefixes = prefixes or self._identity.peer_id[:PREFIX_BYTES]  # none named: this node's own record
        for at in range(0, len(prefixes), PREFIX_BYTES):
            held = self._store.lookup(key, prefixes[at : at + PREFIX_BYTES])
            if held is None or held.expires <= now or not held.is_served:
                continue
            room -= len(held.record.encoded) + 50
            if room < 0:
                break
            left = int((held.expires - now) * 1000)
            where = pack_address(held.proved_at) if held.proved_at is not None else b""
            found.append([held.record.encoded, held.refresh.step, held.refresh.link, left, where])
        return found

    def store(
        self,
        encoded: bytes,
        step: int,
        link: bytes,
        remaining_ms: int,
        signature: bytes,
        *,
        sender: bytes,
        address: Address,
    ) -> list[Any] | None:
        """Take a record from its publisher, who signs the token that it got at `address`."""
        record = parse_record(encoded)
        if record is None or not 0 <= remaining_ms <= MAX_LIFETIME * 1000 or record.peer_id != sender:
            return None
        if not self._is_responsible(record.key):
            return [int(Outcome.REFUSED), b""]
        if not self._ledger.is_home_now(address, sender):
            signed = to_store(self._identity.peer_id, self._token_for(address), record.key)
            if not verify(record.public_key, signed, signature):
                return [int(Outcome.UNKNOWN), b""]
            self._ledger.proved(address, sender)
        now = self._clock()
        outcome = self._store.offer(record, Refresh(step, link), remaining_ms / 1000, now, proved_at=address)
        newer = b""
        if outcome is Outcome.STALE:
            held = self._store.lookup(record.key, record.peer_id[:PREFIX_BYTES])
            newer = held.record.encoded if held else b""
        return [int(outcome), newer]

    def _is_responsible(self, key: bytes) -> bool:
        """Whether this node follows the key, or knows fewer than 2 k nodes that are closer to it."""
        if self._store.is_watched(key):
            return True
        target = int.from_bytes(key, "big")
        own = int.from_bytes(self._identity.peer_id, "big") ^ target
        return sum(1 for contact in self._contacts if contact.long_id ^ target < own) < 2 * self._k
