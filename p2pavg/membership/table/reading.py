"""Reading a key: indexes from its closest nodes, then only the records that are new to this node."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from p2pavg.membership.table.address import Address, unpack_address
from p2pavg.membership.table.node import FETCH_PREFIXES, Node
from p2pavg.membership.table.record import Refresh, parse_record
from p2pavg.membership.table.records.entries import PREFIX_BYTES, Entry, Outcome, decode_entries
from p2pavg.membership.table.wire import Contact, Message, RequestKind, matches

LARGE_KEY = 128  # records; of a larger key only some holders are read to the end
PAGED_HOLDERS = 3
MAX_PAGES = 512
FETCH_AT_ONCE = 4  # records that usually fit one datagram
PARALLEL_FETCHES = 16
MAX_FOREIGN = 32  # records that are none of the run's, after which a node is asked for no more


class _Page(NamedTuple):
    """The head of an index's page: where the next page begins, how many records there are, their digest."""

    cursor: bytes
    records: int
    digest: bytes


class Reading:
    """One read of one key, into the node's store. `want` may pass over peers by the prefix of their ids.

    Nothing in an index is believed: a refresh must be a later link of a record's chain, and a version not yet
    held is only a claim until the record itself arrives, properly signed. Who does not hold what it claims is
    not asked again.
    """

    def __init__(self, node: Node, key: bytes, *, want: Callable[[bytes], bool] | None = None) -> None:
        self._node = node
        self._want = want
        self._key = key
        self._claims: dict[bytes, list[tuple[tuple[int, int], Contact]]] = defaultdict(list)
        self._early: dict[bytes, list[tuple[Contact, Entry]]] = defaultdict(list)  # before the record came
        self._fetching: set[bytes] = set()
        self._liars: set[bytes] = set()
        self._foreign: Counter[bytes] = Counter()
        self._digests: set[bytes] = set()
        self._gate = asyncio.Semaphore(PARALLEL_FETCHES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slow: set[asyncio.Task[None]] = set()
        self._digest_of: dict[bytes, bytes] = {}  # node -> digest of what it holds
        self._read_whole: set[bytes] = set()  # digests of indexes that were read to their ends
        self._changed = asyncio.Event()

    async def run(self, *, brief: bool = False, also: Iterable[Contact] = ()) -> list[Contact]:
        """Read from the key's closest nodes, and `also` from others; return the closest. `brief`: known
        records need no freshness.
        """
        for contact in also:
            self._spawn(self._read_pages(contact, b""))
        known = self._node.store.summary(self._key, self._node.clock())[1] if brief else b""
        try:
            holders = await self._node.lookup(
                self._key, RequestKind.INDEX, [self._key, b"", known], self._first_page
            )
            await self._finish([self._digest_of[holder.id] for holder in holders])
        finally:
            self._cancel()
        return holders

    async def read_from(self, contact: Contact) -> None:
        """Read the whole key from one node."""
        try:
            await self._read_pages(contact, b"")
            await self._finish()
        finally:
            self._cancel()

    async def read_entries(self, contact: Contact, prefixes: list[bytes]) -> None:
        """Ask one node how fresh its records of these peers (at most 28) are."""
        answer = await self._node.rpc.ask(
            contact.address, RequestKind.ENTRIES, [self._key, b"".join(prefixes)], expected=contact.id
        )
        try:
            if answer is not None and matches(answer.body, bytes):
                self._take(contact, decode_entries(answer.body[0]) or [])
                await self._finish()
        finally:
            self._cancel()

    async def read_own(self, address: Address) -> None:
        """Fetch the record that the node at `address` has published itself."""
        answer = await self._node.rpc.ask(address, RequestKind.FETCH, [self._key, b""], tries=1)
        if answer is not None:
            contact = Contact(answer.sender, address)
            for item in answer.body:
                self._keep(contact, item)

    # indexes

    def _first_page(self, contact: Contact, body: list[Any]) -> bool:
        page = self._learn(contact, body)
        if page is None:
            return False
        self._digest_of[contact.id] = page.digest
        if not page.cursor:
            self._read_whole.add(page.digest)
        enough = page.records > LARGE_KEY and len(self._digests) >= PAGED_HOLDERS
        if page.cursor and page.digest not in self._digests and not enough:
            self._digests.add(page.digest)  # equal digests have equal pages
            self._spawn(self._read_pages(contact, page.cursor))
        return True

    async def _read_pages(self, contact: Contact, cursor: bytes) -> None:
        for _ in range(MAX_PAGES):
            answer = await self._ask(contact, RequestKind.INDEX, [self._key, cursor, b""], lambda: True)
            page = self._learn(contact, answer.body) if answer is not None else None
            if page is not None and not page.cursor:
                self._read_whole.add(self._digest_of.get(contact.id, page.digest))
            if page is None or page.cursor <= cursor or contact.id in self._liars:
                return
            cursor = page.cursor

    def _learn(self, contact: Contact, body: list[Any]) -> _Page | None:
        """Take in one page of an index; None when it is malformed."""
        if not matches(body, bytes, bytes, int, bytes, bytes) or len(body[1]) not in (0, PREFIX_BYTES):
            return None
        entries = decode_entries(body[0])
        if entries is None:
            return None
        self._take(contact, entries)
        return _Page(body[1], body[2], body[3])

    def _take(self, contact: Contact, entries: list[Entry]) -> None:
        claimed = []
        for entry in entries:
            if entry.remaining <= 0 or (self._want is not None and not self._want(entry.prefix)):
                continue
            if not self._apply(contact, entry):
                self._claims[entry.prefix].append((entry.version, contact))
                self._early[entry.prefix].append((contact, entry))
                if entry.prefix not in self._fetching:
                    claimed.append(entry.prefix)
        self._fetch_claimed(claimed)

    def _apply(self, contact: Contact, entry: Entry) -> bool:
        """Keep a held record as fresh as a node lists it, by that node's word; False when it is not held."""
        store = self._node.store
        outcome = store.refresh(
            self._key, entry.prefix, entry.version, entry.refresh, entry.remaining, self._node.clock()
        )
        if outcome is not Outcome.UNKNOWN and outcome is not Outcome.REFUSED:
            store.vouch(self._key, entry.prefix, entry.version, contact.id)
        return outcome is not Outcome.UNKNOWN

    # records

    def _fetch_claimed(self, prefixes: list[bytes]) -> None:
        """Start fetching the newest version claimed of each, unless it is held, from whoever claims it."""
        batches: dict[Contact, list[bytes]] = defaultdict(list)
        for prefix in prefixes:
            held = self._node.store.lookup(self._key, prefix)
            known = (-1, -1) if held is None else held.record.version
            ran_out = held is not None and held.expires <= self._node.clock()
            claims = self._claims.pop(prefix, [])  # empty when a page lists a peer twice
            useful = [
                (version, contact)
                for version, contact in claims
                if (version > known or (ran_out and version == known)) and contact.id not in self._liars
            ]
            if useful:
                newest = max(useful, key=lambda claim: claim[0])
                self._claims[prefix] = [claim for claim in useful if claim is not newest]
                self._fetching.add(prefix)
                batches[newest[1]].append(prefix)
        for contact, batch in batches.items():
            for at in range(0, len(batch), FETCH_AT_ONCE):
                self._spawn(self._fetch(contact, batch[at : at + FETCH_AT_ONCE]))

    async def _fetch(self, contact: Contact, prefixes: list[bytes]) -> None:
        missing = prefixes
        async with self._gate:
            while missing and contact.id not in self._liars:
                body = [self._key, b"".join(missing)]
                answer = await self._ask(
                    contact, RequestKind.FETCH, body, partial(self._fetch_elsewhere, missing)
                )
                got = {self._keep(contact, item) for item in answer.body} if answer is not None else set()
                if got.isdisjoint(missing):
                    self._liars.add(contact.id)
                missing = [prefix for prefix in missing if prefix not in got]
        self._fetching.difference_update(prefixes)
        self._fetch_claimed(prefixes)

    def _fetch_elsewhere(self, prefixes: list[bytes]) -> bool:
        """Ask others for the same when a node is slow. False: no others claim to have all of it."""
        elsewhere = all(self._claims.get(prefix) for prefix in prefixes)
        if elsewhere:
            self._fetching.difference_update(prefixes)
            self._fetch_claimed(prefixes)
        return elsewhere

    def _keep(self, contact: Contact, item: Any) -> bytes | None:
        if type(item) is not list or not matches(item, bytes, int, bytes, int, bytes):
            return None
        record = parse_record(item[0])
        if record is None or record.key != self._key:
            return None
        told_at = unpack_address(item[4])
        if told_at is not None:
            self._node.rpc.ledger.told(told_at, len(record.encoded))
        outcome = self._node.store.offer(
            record,
            Refresh(item[1], item[2]),
            item[3] / 1000,
            self._node.clock(),
            proved_at=contact.address if contact.id == record.peer_id else None,
            told_at=told_at,
            told_by=contact.id,
        )
        if outcome is Outcome.FOREIGN:
            self._foreign[contact.id] += 1
            if self._foreign[contact.id] > MAX_FOREIGN:
                self._liars.add(contact.id)
        if outcome is Outcome.REFUSED:
            return None
        prefix = record.peer_id[:PREFIX_BYTES]
        for teller, entry in self._early.pop(prefix, ()):
            self._apply(teller, entry)
        return prefix

    # tasks

    async def _ask(
        self, contact: Contact, kind: RequestKind, body: list[Any], on_slow: Callable[[], bool]
    ) -> Message | None:
        """Ask within a task of this reading, which may end without it when `on_slow` says so."""
        task = asyncio.current_task()
        assert task is not None

        def slow() -> None:
            if on_slow():
                self._slow.add(task)
                self._changed.set()

        answer = await self._node.rpc.ask(contact.address, kind, body, expected=contact.id, on_slow=slow)
        self._slow.discard(task)
        return answer

    async def _finish(self, digests: list[bytes] | None = None) -> None:
        """Wait for all tasks; given nodes' `digests`, for slow ones only until most nodes were read whole."""
        while self._tasks:
            if digests is not None and self._tasks <= self._slow:
                whole = sum(digest in self._read_whole for digest in digests)
                if 2 * whole > len(digests):
                    return
            self._changed.clear()
            await self._changed.wait()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slow.discard(task)
        self._changed.set()


assert FETCH_AT_ONCE <= FETCH_PREFIXES
