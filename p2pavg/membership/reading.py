"""Reading a key: indexes from its closest nodes, then only the records that are new to this node."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from p2pavg.membership.address import Address
from p2pavg.membership.node import FETCH_PREFIXES, Node
from p2pavg.membership.record import MAX_RECORD_BYTES, Refresh, parse_record
from p2pavg.membership.store import PREFIX_BYTES, Entry, Outcome, decode_entries
from p2pavg.membership.wire import Contact, Kind, matches

LARGE_KEY = 256  # records; of a larger key only some holders are read to the end
PAGED_HOLDERS = 3
MAX_PAGES = 512
FETCH_AT_ONCE = 4  # records that usually fit one datagram
PARALLEL_FETCHES = 16


class _Page(NamedTuple):
    """What a page of an index says about the rest: where it goes on, how many records, their digest."""

    cursor: bytes
    records: int
    digest: bytes


class Reading:
    """One read of one key, into the node's store. `want` may pass over peers by the prefix of their ids."""

    def __init__(self, node: Node, key: bytes, *, want: Callable[[bytes], bool] | None = None) -> None:
        self._node = node
        self._want = want
        self._key = key
        self._wanted: dict[tuple[bytes, tuple[int, int]], list[Contact]] = defaultdict(list)

    async def run(self, *, brief: bool = False) -> None:
        """Read from the key's closest nodes; `brief`: how fresh known records are does not matter."""
        pages: dict[bytes, _Page] = {}
        known = self._node.store.summary(self._key, self._node.clock())[1] if brief else b""

        def on_body(contact: Contact, body: list[Any]) -> bool:
            page = self._learn(contact, body)
            if page is None:
                return False
            pages[contact.id] = page
            return True

        holders = await self._node.lookup(self._key, Kind.INDEX, [self._key, b"", known], on_body)
        unread: dict[bytes, tuple[Contact, bytes]] = {}
        for holder in holders:
            page = pages[holder.id]
            if page.cursor and not (page.records > LARGE_KEY and len(unread) >= PAGED_HOLDERS):
                unread.setdefault(page.digest, (holder, page.cursor))  # equal digests have equal pages
        await asyncio.gather(*(self._read_pages(*start) for start in unread.values()))
        await self._fetch_wanted()

    async def read_from(self, contact: Contact) -> bool:
        """Read the whole key from one node; False when it does not answer as a correct node does."""
        complete = await self._read_pages(contact, b"")
        await self._fetch_wanted()
        return complete

    async def read_entries(self, contact: Contact, prefixes: list[bytes]) -> None:
        """Ask one node how fresh its records of these peers (at most 28) are."""
        answer = await self._node.rpc.ask(
            contact.address, Kind.ENTRIES, [self._key, b"".join(prefixes)], expected=contact.id
        )
        if answer is not None and matches(answer.body, bytes):
            for entry in decode_entries(answer.body[0]) or ():
                self._take(contact, entry)
            await self._fetch_wanted()

    async def read_own(self, address: Address) -> None:
        """Fetch the record that the node at `address` has published itself."""
        answer = await self._node.rpc.ask(address, Kind.FETCH, [self._key, b""], tries=1)
        for item in answer.body if answer is not None else ():
            self._keep(item)

    async def _read_pages(self, contact: Contact, cursor: bytes) -> bool:
        for _ in range(MAX_PAGES):
            answer = await self._node.rpc.ask(
                contact.address, Kind.INDEX, [self._key, cursor, b""], expected=contact.id
            )
            page = self._learn(contact, answer.body) if answer is not None else None
            if page is None or (page.cursor and page.cursor <= cursor):
                return False
            if not page.cursor:
                return True
            cursor = page.cursor
        return False

    def _learn(self, contact: Contact, body: list[Any]) -> _Page | None:
        """Take in one page of an index; None when it is malformed."""
        if not matches(body, bytes, bytes, int, bytes, bytes) or len(body[1]) not in (0, PREFIX_BYTES):
            return None
        entries = decode_entries(body[0])
        if entries is None:
            return None
        for entry in entries:
            self._take(contact, entry)
        return _Page(body[1], body[2], body[3])

    def _take(self, contact: Contact, entry: Entry) -> None:
        if entry.remaining <= 0 or (self._want is not None and not self._want(entry.prefix)):
            return
        store, now = self._node.store, self._node.clock()
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
        outcome = self._node.store.offer(
            record, Refresh(item[1], item[2]), item[3] / 1000, self._node.clock()
        )
        return None if outcome is Outcome.REFUSED else record.peer_id[:PREFIX_BYTES]


assert FETCH_AT_ONCE <= FETCH_PREFIXES
