"""Keeping one record of this node alive under a key: sign it, place it on the closest nodes, refresh it
cheaply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from p2pavg.membership.node import Node
from p2pavg.membership.record import (
    MAX_INCARNATION,
    Chain,
    SignedRecord,
    has_valid_signature,
    parse_record,
    sign_record,
)
from p2pavg.membership.store import PREFIX_BYTES, Outcome
from p2pavg.membership.wire import Contact, Kind, matches

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

    @property
    def incarnation(self) -> int:
        return self._incarnation

    async def publish(self, value: bytes, lifetime: float) -> bool:
        """Place the record on the k closest nodes; True when any node, this one included, holds it."""
        async with self._lock:
            self._advance(value, lifetime)
            if time.monotonic() - self._looked_up > HOLDERS_SECONDS or not self._holders:
                await self._find_holders()
            accepted = await self._place(self._holders)
            if not all(accepted):
                await self._find_holders()
                accepted = await self._place(self._holders)
            return any(accepted) or not self._holders

    async def push(self, contacts: Iterable[Contact]) -> None:
        """Hand the record, as it stands, to these nodes directly."""
        await asyncio.gather(*(self._store_at(contact) for contact in contacts))

    async def _find_holders(self) -> None:
        self._holders = await self._node.find(self._key)
        self._looked_up = time.monotonic()

    def _advance(self, value: bytes, lifetime: float) -> None:
        record = self._record
        same = record is not None and record.value == value and record.lifetime == int(lifetime * 1000) / 1000
        if not same or self._chain.reveal() is None:
            self._sign(value, lifetime)
        self._keep()

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
        self._node.store.offer(self._record, self._chain.last, self._record.lifetime, time.monotonic())

    async def _place(self, contacts: list[Contact]) -> list[bool]:
        return list(await asyncio.gather(*(self._refresh_at(contact) for contact in contacts)))

    async def _refresh_at(self, contact: Contact) -> bool:
        record = self._record
        assert record is not None
        if contact.id not in self._fresh_holders:
            return await self._store_at(contact)
        step, link = self._chain.last
        prefix = record.peer_id[:PREFIX_BYTES]
        body = [record.key, prefix, record.incarnation, record.sequence, step, link]
        answer = await self._node.rpc.ask(contact.address, Kind.REFRESH, body, expected=contact.id)
        if answer is None or not matches(answer.body, int):
            self._node.failed(contact)
            return False
        if answer.body[0] in (Outcome.REFRESHED, Outcome.KNOWN):
            return True
        return await self._store_at(contact)

    async def _store_at(self, contact: Contact) -> bool:
        for _ in range(3):
            record = self._record
            assert record is not None
            step, link = self._chain.last
            body = [record.encoded, step, link, int(record.lifetime * 1000)]
            answer = await self._node.rpc.ask(contact.address, Kind.STORE, body, expected=contact.id)
            if answer is None or not matches(answer.body, int, bytes):
                self._node.failed(contact)
                return False
            outcome, newer = answer.body
            if outcome in (Outcome.NEW, Outcome.REFRESHED, Outcome.KNOWN):
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
