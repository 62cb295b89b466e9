"""The contacts that a node keeps: kademlia's buckets, with exact neighbours and addresses that change."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from kademlia.routing import RoutingTable

from p2pavg.membership.table.address import Address
from p2pavg.membership.table.wire import Contact
from p2pavg.networks import is_private, network_of, source_of

PLACES_OF_SOURCE = 2  # times k
PLACES_OF_NETWORK = 8  # times k


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
        self._by_address: dict[Address, bytes] = {}
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

    def at(self, address: Address) -> Contact | None:
        """The contact that lives at an address."""
        peer_id = self._by_address.get(address)
        return None if peer_id is None else self.get(peer_id)

    def rivals(self, contact: Contact) -> list[Contact]:
        """Whom a contact contradicts: itself at another address, and who else lives at its address. While one
        of them answers, the contact has no place: a node lives at one address, and an address has one node.
        """
        found = (self.get(contact.id), self.at(contact.address))
        return [other for other in found if other is not None and other != contact]

    def add(self, contact: Contact) -> bool:
        """Add a verified contact that has no rivals. True when it was not known and has a place now."""
        if contact.id == self._own_id or contact.id in self._by_id or self.rivals(contact):
            return False
        if self._crowds(contact):
            return False
        entry = self._by_id[contact.id] = _Entry(contact)
        self._by_address[contact.address] = contact.id
        self._table.add_contact(entry)
        self._forget_overflow()
        return True

    def remove(self, peer_id: bytes) -> None:
        entry = self._by_id.pop(peer_id, None)
        if entry is not None:
            self._by_address.pop(entry.contact.address, None)
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
        """Whether its source or its network has its share of the table: identities are free, addresses are
        not. On private networks, and on this machine, they are as free, and no stranger is.
        """
        host = contact.address[0]
        if is_private(host):
            return False
        source, network = source_of(host), network_of(host)
        hosts = [other.address[0] for other in self]
        return (
            sum(source_of(h) == source for h in hosts) >= PLACES_OF_SOURCE * self._k
            or sum(network_of(h) == network for h in hosts) >= PLACES_OF_NETWORK * self._k
        )

    async def _probe(self, entry: _Entry) -> None:
        if not await self._is_alive(entry.contact):
            self.remove(entry.id)

    def _forget_overflow(self) -> None:
        """Contacts that kademlia dropped from a bucket's bounded list of replacements."""
        if len(self._by_id) > 8 * self._k * max(8, len(self._table.buckets)):
            kept = {i for bucket in self._table.buckets for i in (*bucket.nodes, *bucket.replacement_nodes)}
            self._by_id = {i: e for i, e in self._by_id.items() if i in kept}
            self._by_address = {e.contact.address: i for i, e in self._by_id.items()}
