"""Keeping one record of this node alive under a key: sign it, place it on the closest nodes, refresh it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable

from p2pavg.membership.table.node import Node
from p2pavg.membership.table.record import (
    MAX_INCARNATION,
    Chain,
    Refresh,
    SignedRecord,
    has_valid_signature,
    parse_record,
    sign_record,
    to_store,
)
from p2pavg.membership.table.records.entries import PREFIX_BYTES, Outcome
from p2pavg.membership.table.wire import Contact, RequestKind, matches

HOLDERS_SECONDS = 30.0


class Publication:
    """This node's record under `key`."""

    def __init__(self, node: Node, key: bytes, incarnation: int) -> None:
        self._node = node
        self._key = key
        self._incarnation = incarnation
        self._sequence = 0
        self._chain = Chain()
        self._record: SignedRecord | None = None
        self._holders: list[Contact] = []
        self._looked_up = float("-inf")
        self._fresh_holders: set[bytes] = set()  # nodes that hold this version, so that a refresh will do
        self._lock = asyncio.Lock()
        self._work: set[asyncio.Future[bool]] = set()

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def record(self) -> SignedRecord | None:
        """The record as last signed."""
        return self._record

    @property
    def refresh(self) -> Refresh:
        """The newest revealed link of its chain."""
        return self._chain.last

    async def publish(self, value: bytes, lifetime: float) -> bool:
        """Place the record on the k closest nodes; True when any node, this one included, holds it."""
        self.advance(value, lifetime)
        return await self.place()

    def advance(self, value: bytes, lifetime: float) -> None:
        """Stand by the record for another lifetime; sign it anew when it changes or its chain is used up."""
        record = self._record
        same = record is not None and record.value == value and record.lifetime == int(lifetime * 1000) / 1000
        if not same or self._chain.reveal() is None:
            self._sign(value, lifetime)
        self._keep()

    async def place(self, *, except_at: Container[bytes] = ()) -> bool:
        """Bring the record as it stands to the k closest nodes. A node that is slow to answer is replaced.

        Nodes whose ids are in `except_at` get it otherwise.
        """
        async with self._lock:
            if self._node.clock() - self._looked_up > HOLDERS_SECONDS or not self._holders:
                await self._find_holders()
            holders = list(self._holders)  # `use_holders` may replace them meanwhile
            accepted = await asyncio.gather(*(self._promptly(holder, except_at) for holder in holders))
            if not all(accepted):
                before = {holder for holder, kept in zip(holders, accepted, strict=True) if kept}
                await self._find_holders()
                added = [holder for holder in self._holders if holder not in before]
                accepted += await asyncio.gather(*(self._promptly(holder, except_at) for holder in added))
            return any(accepted) or not self._holders

    def use_holders(self, holders: list[Contact]) -> None:
        """Take the k closest nodes from a lookup that somebody made just now."""
        self._holders = holders
        self._looked_up = self._node.clock()

    async def push(self, contacts: Iterable[Contact]) -> None:
        """Hand the record, as it stands, to these nodes directly."""
        await asyncio.gather(*(self._store_at(contact) for contact in contacts))

    async def _find_holders(self) -> None:
        self.use_holders(await self._node.find(self._key))

    async def _promptly(self, holder: Contact, except_at: Container[bytes]) -> bool:
        """Place the record at one holder; False as soon as it is slow, though it may still take it."""
        if holder.id in except_at:
            return True
        slow = asyncio.Event()
        work = asyncio.ensure_future(self._refresh_at(holder, slow.set))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        waiting = asyncio.ensure_future(slow.wait())
        await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return work.done() and work.result()

    def _sign(self, value: bytes, lifetime: float) -> None:
        self._sequence += 1
        self._chain = Chain()
        self._record = sign_record(
            self._node.identity,
            self._key,
            value,
            incarnation=self._incarnation,
            sequence=self._sequence,
            lifetime=lifetime,
            anchor=self._chain.anchor,
        )
        self._fresh_holders = set()

    def _keep(self) -> None:
        assert self._record is not None
        self._node.store.offer(
            self._record, self._chain.last, self._record.lifetime, self._node.clock(), own=True
        )

    async def _refresh_at(self, contact: Contact, on_slow: Callable[[], None]) -> bool:
        record = self._record
        assert record is not None
        if contact.id not in self._fresh_holders:
            return await self._store_at(contact, on_slow)
        step, link = self._chain.last
        prefix = record.peer_id[:PREFIX_BYTES]
        body = [record.key, prefix, record.incarnation, record.sequence, step, link]
        answer = await self._node.rpc.ask(
            contact.address, RequestKind.REFRESH, body, expected=contact.id, on_slow=on_slow
        )
        if answer is None or not matches(answer.body, int):
            self._node.failed(contact)
            return False
        if answer.body[0] in (Outcome.REFRESHED, Outcome.KNOWN):
            return True
        return await self._store_at(contact, on_slow)

    async def _store_at(self, contact: Contact, on_slow: Callable[[], None] | None = None) -> bool:
        rpc = self._node.rpc
        for _ in range(3):
            if not rpc.has_token(contact.address):
                opened = await rpc.ask(
                    contact.address, RequestKind.PING, [], expected=contact.id, on_slow=on_slow
                )
                if opened is None:
                    self._node.failed(contact)
                    return False
            record = self._record
            assert record is not None
            step, link = self._chain.last
            signed = to_store(contact.id, rpc.token_from(contact.address), self._key)
            signature = self._node.identity.sign(signed)
            body = [record.encoded, step, link, int(record.lifetime * 1000), signature]
            answer = await self._node.rpc.ask(
                contact.address, RequestKind.STORE, body, expected=contact.id, on_slow=on_slow
            )
            if answer is None or not matches(answer.body, int, bytes):
                self._node.failed(contact)
                return False
            outcome, newer = answer.body
            holds_it = outcome in (Outcome.NEW, Outcome.REFRESHED, Outcome.KNOWN)
            if holds_it or (outcome == Outcome.STALE and newer == record.encoded):
                self._fresh_holders.add(contact.id)
                return True
            if outcome == Outcome.STALE:
                self._overtake(newer)
            elif outcome != Outcome.UNKNOWN:
                return False
        return False

    def _overtake(self, newer: bytes) -> None:
        """An earlier life of this identity left a record that counts as newer (its clock was ahead): go
        beyond it.
        """
        theirs, ours = parse_record(newer), self._record
        assert ours is not None
        if theirs is None or theirs.public_key != self._node.identity.public_key or theirs.key != self._key:
            return
        if theirs.version < ours.version or not has_valid_signature(theirs):
            return
        self._incarnation = min(theirs.incarnation + 1, MAX_INCARNATION)
        self._sign(ours.value, ours.lifetime)
        self._keep()
