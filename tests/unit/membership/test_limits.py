"""What strangers can cost a node: time, places in its table, places in its store."""

from __future__ import annotations

import hashlib

import pytest

from p2pavg.identity import Identity
from p2pavg.membership.table.beat import BEAT_BYTES, BEAT_MARK, HEARD_BYTES
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.record import Chain, Refresh, sign_record, to_store
from p2pavg.membership.table.records import store
from p2pavg.membership.table.records.entries import Outcome
from p2pavg.membership.table.records.store import RecordStore
from p2pavg.membership.table.routing import Contacts
from p2pavg.membership.table.serving import BEAT_WORK, REQUESTS_AT_ONCE
from p2pavg.membership.table.throttle import Throttle
from p2pavg.membership.table.wire import Contact


def node_id(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:20]


async def alive(contact: Contact) -> bool:
    return True


def test_a_source_gets_a_burst_and_then_its_rate() -> None:
    """One source is served `burst` requests at once and then `rate` a second; others are not affected."""
    throttle = Throttle(rate=10.0, burst=20.0)
    assert sum(throttle.admits("10.0.0.1", 0.0) for _ in range(100)) == 20
    assert sum(throttle.admits("10.0.0.1", 1.0) for _ in range(100)) == 10
    assert throttle.admits("10.0.0.2", 1.0)


async def test_one_public_address_cannot_fill_the_table() -> None:
    """However many identities a public address shows, it gets 2 k places; private ones are not limited."""
    contacts = Contacts(node_id(0), 8, alive)
    for number in range(1, 500):
        contacts.add(Contact(node_id(number), ("8.8.8.8", number)))
    assert len(contacts) <= 16
    assert contacts.add(Contact(node_id(1000), ("8.8.4.4", 1)))
    private = Contacts(node_id(0), 8, alive)
    for number in range(1, 500):
        private.add(Contact(node_id(number), ("10.0.0.1", number)))
    assert len(private) > 30


@pytest.mark.parametrize("address", ["100.64.7.%d", "2001:db8:0:1::%x", "2001:db8:0:%x::1"])
async def test_one_network_cannot_fill_the_table(address: str) -> None:
    """Addresses that a carrier shares, those of one /64, and those of one /48 get the places of one source or
    network, not each its own.
    """
    contacts = Contacts(node_id(0), 8, alive)
    for number in range(1, 3000):
        contacts.add(Contact(node_id(number), (address % (number % 250), number)))
    assert len(contacts) <= (16 if "0:1" in address else 64)


async def test_an_address_has_one_node_and_a_node_one_address() -> None:
    """A known id at another address, and another id at a known address, get no place beside the known."""
    contacts = Contacts(node_id(0), 8, alive)
    first = Contact(node_id(1), ("10.0.0.1", 1))
    assert contacts.add(first)
    moved, other = Contact(node_id(1), ("10.0.0.2", 2)), Contact(node_id(2), ("10.0.0.1", 1))
    for rival in (moved, other):
        assert contacts.rivals(rival) == [first]
        assert not contacts.add(rival)
    contacts.remove(node_id(1))
    assert contacts.add(moved)
    assert contacts.add(other)
    assert contacts.at(("10.0.0.1", 1)) == other


async def test_neighbours_are_exact() -> None:
    """The nearest contacts are the nearest of the whole table, in order."""
    contacts = Contacts(node_id(0), 8, alive)
    for number in range(1, 200):
        contacts.add(Contact(node_id(number), ("10.0.0.1", number)))
    target = int.from_bytes(node_id(777), "big")
    kept = sorted(contacts, key=lambda contact: contact.long_id ^ target)
    assert contacts.nearest(node_id(777), 8) == kept[:8]


async def test_records_of_other_regions_are_refused() -> None:
    """A node that knows 2 k nodes closer to a key does not hold it, unless it follows that key itself."""
    node = Node(Identity.generate(), k=2, client_only=False, clock=lambda: 0.0)
    key = bytes(byte ^ 0xFF for byte in node.identity.peer_id)
    for number in range(1, 400):
        node.contacts.add(Contact(node_id(number), ("10.0.0.1", number)))
    publisher, address = Identity.generate(), ("10.0.0.7", 31330)
    record = sign_record(publisher, key, b"v", incarnation=1, sequence=1, lifetime=9.0, anchor=Chain().anchor)
    signed = to_store(node.identity.peer_id, node.rpc.token_for(address), key)
    body = (record.encoded, 0, record.anchor, 9000, publisher.sign(signed))
    sender = publisher.peer_id
    assert node.answers.store(*body, sender=sender, address=address) == [Outcome.REFUSED, b""]
    node.store.watch(key, lambda held: None)
    assert node.answers.store(*body, sender=sender, address=address) == [Outcome.NEW, b""]


@pytest.mark.parametrize("checked", [False, True])
def test_a_full_store_is_not_searched_for_every_record(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred records a second that find no room, one has all others looked through."""
    if not checked:
        monkeypatch.setattr(store, "LOOK_SECONDS", 0.0)
    held, looks, purge = RecordStore(max_records=1), 0, RecordStore.purge

    def counted(*args: object, **options: object) -> None:
        nonlocal looks
        looks += 1
        purge(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordStore, "purge", counted)
    made = [
        sign_record(Identity.generate(), bytes(20), b"", incarnation=1, sequence=1, lifetime=9.0, anchor=link)
        for link in (Chain().anchor for _ in range(3))
    ]
    for number in range(200):
        for record in made[:2]:
            held.offer(record, Refresh(0, record.anchor), 9.0, number / 100)
    assert looks == (2 if checked else 200)
    assert held.offer(made[2], Refresh(0, made[2].anchor), 9.0, 20.0) is Outcome.NEW


@pytest.mark.parametrize("checked", [False, True])
async def test_a_flood_of_heartbeats_is_not_looked_at(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each beat may cost 255 hashes: of 100,000 from one address at once a few thousand are looked at, where
    senders are not limited all of them.
    """
    node = Node(Identity.generate(), k=2, client_only=False, clock=lambda: 0.0)
    looked = 0

    def handle_beat(data: bytes, address: tuple[str, int]) -> None:
        nonlocal looked
        looked += 1

    monkeypatch.setattr(node, "handle_beat", handle_beat)
    if not checked:
        monkeypatch.setattr(Throttle, "admits", lambda *_: True)
    for port in range(100_000):
        node.rpc.datagram_received(BEAT_MARK + bytes(BEAT_BYTES - 1), ("10.0.0.1", port % 1000))
    assert looked == (REQUESTS_AT_ONCE / BEAT_WORK if checked else 100_000)


async def test_a_beat_costs_by_what_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of beats that pass on what 40 others said, each of which may cost hashes, a thirtieth is looked at."""
    node = Node(Identity.generate(), k=2, client_only=False, clock=lambda: 0.0)
    looked: list[bytes] = []
    monkeypatch.setattr(node, "handle_beat", lambda data, address: looked.append(data))
    size = BEAT_BYTES + 40 * HEARD_BYTES
    for _ in range(10_000):
        node.rpc.datagram_received(BEAT_MARK + bytes(size - 1), ("10.0.0.1", 1))
    assert len(looked) == int(REQUESTS_AT_ONCE / (BEAT_WORK * size / BEAT_BYTES))
