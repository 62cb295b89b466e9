"""Reading a key: indexes from its closest nodes, then only the records that are new to this node."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

from p2pavg.membership.node import FETCH_PREFIXES, Node
from p2pavg.membership.record import MAX_RECORD_BYTES, Refresh, parse_record
from p2pavg.membership.store import PREFIX_BYTES, Entry, Outcome, decode_entries
from p2pavg.membership.wire import Contact, Kind, matches

PAGED_HOLDERS = 3
MAX_PAGES = 512
FETCH_AT_ONCE = 4  # records that usually fit one datagram
PARALLEL_FETCHES = 16


class Reading:
    """One read of one key; what it finds goes into the node's store."""

    def __init__(self, node: Node, key: bytes) -> None:
        self._node = node
        self._key = key
        self._wanted: dict[tuple[bytes, tuple[int, int]], list[Contact]] = defaultdict(list)

    async def run(self) -> None:
        more: dict[bytes, bytes] = {}

        def on_body(contact: Contact, body: list[Any]) -> bool:
            cursor = self._learn(contact, body)
            if cursor is None:
                return False
            if cursor:
                more[contact.id] = cursor
            return True

        holders = await self._node.lookup(self._key, Kind.INDEX, [self._key, b""], on_body)
        unread = [(holder, more[holder.id]) for holder in holders if holder.id in more]
        await asyncio.gather(*(self._read_pages(*start) for start in unread[:PAGED_HOLDERS]))
        await self._fetch_wanted()

    async def read_from(self, contact: Contact) -> bool:
        """Read the whole key from one node; False when it does not answer as a correct node does."""
        complete = await self._read_pages(contact, b"")
        await self._fetch_wanted()
        return complete

    async def _read_pages(self, contact: Contact, cursor: bytes) -> bool:
        for _ in range(MAX_PAGES):
            answer = await self._node.rpc.ask(
                contact.address, Kind.INDEX, [self._key, cursor], expected=contact.id
            )
            following = self._learn(contact, answer.body) if answer is not None else None
            if following is None or (following and following <= cursor):
                return False
            if not following:
                return True
            cursor = following
        return False

    def _learn(self, contact: Contact, body: list[Any]) -> bytes | None:
        """Take in one page of an index; its next cursor, or None when it is malformed."""
        if not matches(body, bytes, bytes, bytes) or len(body[1]) not in (0, PREFIX_BYTES):
            return None
        entries = decode_entries(body[0])
        if entries is None:
            return None
        for entry in entries:
            self._take(contact, entry)
        return bytes(body[1])

    def _take(self, contact: Contact, entry: Entry) -> None:
        if entry.remaining <= 0:
            return
        store, now = self._node.store, time.monotonic()
        outcome = store.refresh(self._key, entry.prefix, entry.version, entry.refresh, entry.remaining, now)
        if outcome is Outcome.UNKNOWN:
            self._wanted[entry.prefix, entry.version].append(contact)

    async def _fetch_wanted(self) -> None:
        """Fetch every wanted record, newest versions only, from the holders that list it, in turn."""
        newest: dict[bytes, tuple[int, int]] = {}
        for prefix, version in self._wanted:
            newest[prefix] = max(version, newest.get(prefix, (0, 0)))
        sources = {prefix: self._wanted[prefix, version] for prefix, version in newest.items()}
        gate = asyncio.Semaphore(PARALLEL_FETCHES)

        async def fetch(contact: Contact, prefixes: list[bytes]) -> None:
            async with gate:
                await self._fetch(contact, prefixes)

        for attempt in range(self._node.k):
            batches: dict[Contact, list[bytes]] = defaultdict(list)
            for index, (prefix, holders) in enumerate(sources.items()):
                if attempt < len(holders) and self._is_missing(prefix, newest[prefix]):
                    batches[holders[(index // FETCH_AT_ONCE + attempt) % len(holders)]].append(prefix)
            if not batches:
                return
            await asyncio.gather(
                *(
                    fetch(contact, prefixes[at : at + FETCH_AT_ONCE])
                    for contact, prefixes in batches.items()
                    for at in range(0, len(prefixes), FETCH_AT_ONCE)
                )
            )

    def _is_missing(self, prefix: bytes, version: tuple[int, int]) -> bool:
        held = self._node.store.lookup(self._key, prefix)
        return held is None or held.record.version < version

    async def _fetch(self, contact: Contact, prefixes: list[bytes]) -> None:
        while prefixes:
            answer = await self._node.rpc.ask(
                contact.address, Kind.FETCH, [self._key, b"".join(prefixes)], expected=contact.id
            )
            if answer is None:
                return
            got = {prefix for item in answer.body if (prefix := self._keep(item)) is not None}
            if not got:
                return
            prefixes = [prefix for prefix in prefixes if prefix not in got]

    def _keep(self, item: Any) -> bytes | None:
        if (
            type(item) is not list
            or not matches(item, bytes, int, bytes, int)
            or len(item[0]) > MAX_RECORD_BYTES
        ):
            return None
        record = parse_record(item[0])
        if record is None or record.key != self._key:
            return None
        outcome = self._node.store.offer(record, Refresh(item[1], item[2]), item[3] / 1000, time.monotonic())
        return None if outcome is Outcome.REFUSED else record.peer_id[:PREFIX_BYTES]


assert FETCH_AT_ONCE <= FETCH_PREFIXES
