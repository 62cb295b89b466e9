"""The contacts that a node keeps: kademlia's buckets, with exact neighbours and addresses that change."""

from __future__ import annotations

import heapq
import ipaddress
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from kademlia.routing import RoutingTable

from p2pavg.membership.table.wire import Contact


class _Entry:
    """A contact as kademlia's buckets want it."""

    __slots__ = ("contact", "id", "long_id")

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.id = contact.id
        self.long_id = contact.long_id


class _Probe(NamedTuple):
    """The only thing that kademlia's table asks of its protocol: is the oldest contact of a full bucket
    still there?
    """

    call_ping: Callable[[Any], Awaitable[None]]


class Contacts:
    """Verified contacts in buckets of `k`. `is_alive` is asked about the oldest contact of a bucket that
    is full.
    """

    def __init__(self, own_id: bytes, k: int, is_alive: Callable[[Contact], Awaitable[bool]]) -> None:
        self._by_id: dict[bytes, _Entry] = {}
        self._is_alive = is_alive
        self._table: Any = RoutingTable(_Probe(self._probe), k, _Entry(Contact(own_id, ("", 0))))
        self._own_id = own_id
        self._k = k

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._table.buckets)

    def __iter__(self) -> Iterator[Contact]:
        for bucket in self._table.buckets:
            for entry in bucket.get_nodes():
                yield entry.contact

    def get(self, peer_id: bytes) -> Contact | None:
        entry = self._by_id.get(peer_id)
        return entry.contact if entry else None

    def add(self, contact: Contact) -> bool:
        """Add a verified contact, or move a known one to its new address. True when it was not known
        before.
        """
        if contact.id == self._own_id:
            return False
        known = self._by_id.get(contact.id)
        if known is not None and known.contact.address == contact.address:
            return False
        if known is None and self._crowds(contact):
            return False
        if known is not None:
            self._table.remove_contact(known)
        entry = self._by_id[contact.id] = _Entry(contact)
        self._table.add_contact(entry)
        self._forget_overflow()
        return known is None

    def remove(self, peer_id: bytes) -> None:
        entry = self._by_id.pop(peer_id, None)
        if entry is not None:
            self._table.remove_contact(entry)

    def nearest(self, target: bytes, count: int) -> list[Contact]:
        """The `count` contacts closest to `target`, closest first."""
        wanted = int.from_bytes(target, "big")
        entries = (entry for bucket in self._table.buckets for entry in bucket.get_nodes())
        return [e.contact for e in heapq.nsmallest(count, entries, key=lambda e: e.long_id ^ wanted)]

    def ranges(self) -> list[tuple[int, int]]:
        """The id range of every bucket."""
        return [bucket.range for bucket in self._table.buckets]

    def _crowds(self, contact: Contact) -> bool:
        """Whether one public address has its share of the table: identities are free, addresses are not."""
        host = contact.address[0]
        if not ipaddress.ip_address(host).is_global:
            return False
        return sum(1 for other in self if other.address[0] == host) >= 2 * self._k

    async def _probe(self, entry: _Entry) -> None:
        if not await self._is_alive(entry.contact):
            self.remove(entry.id)

    def _forget_overflow(self) -> None:
        """Contacts that kademlia dropped from a bucket's bounded list of replacements."""
        if len(self._by_id) > 8 * self._k * max(8, len(self._table.buckets)):
            kept = {i for bucket in self._table.buckets for i in (*bucket.nodes, *bucket.replacement_nodes)}
            self._by_id = {i: e for i, e in self._by_id.items() if i in kept}
