from __future__ import annotations

from p2pavg.identity import Identity
from p2pavg.membership.table.record import Chain, Refresh, SignedRecord, sign_record
from p2pavg.membership.table.records.entries import ENTRY_BYTES, Outcome, StoredRecord, decode_entries
from p2pavg.membership.table.records.store import RecordStore

KEY = b"k" * 20
WHERE = ("192.0.2.1", 31330)


class Publisher:
    """Signs records of one identity."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.chain = Chain()

    def sign(self, sequence: int = 1, *, incarnation: int = 1, lifetime: float = 10.0) -> SignedRecord:
        self.chain = Chain()
        return sign_record(
            self.identity,
            KEY,
            b"%d" % sequence,
            incarnation=incarnation,
            sequence=sequence,
            lifetime=lifetime,
            anchor=self.chain.anchor,
        )


def offer(store: RecordStore, record: SignedRecord, now: float, remaining: float = 300.0) -> Outcome:
    return store.offer(record, Refresh(0, record.anchor), remaining, now, proved_at=WHERE)


def values(store: RecordStore, now: float) -> list[bytes]:
    return [held.record.value for held in store.live(KEY, now)]


def test_newer_versions_win_and_older_ones_never_come_back() -> None:
    """Records are ordered by (incarnation, sequence), whatever the order in which they arrive."""
    store, publisher = RecordStore(), Publisher()
    first, second, reborn = publisher.sign(1), publisher.sign(2), publisher.sign(1, incarnation=2)
    assert offer(store, second, 0.0) is Outcome.NEW
    assert offer(store, first, 0.0) is Outcome.STALE
    assert offer(store, reborn, 0.0) is Outcome.NEW
    assert offer(store, second, 0.0) is Outcome.STALE
    assert values(store, 0.0) == [b"1"]


def test_a_replayed_record_stays_dead() -> None:
    """A record that expired cannot be brought back to life by sending it again, only by its publisher."""
    store, publisher = RecordStore(), Publisher()
    record = publisher.sign()
    offer(store, record, 0.0)
    assert values(store, 9.9) == [b"1"]
    assert not values(store, 10.0)
    assert offer(store, record, 11.0) is Outcome.KNOWN
    assert not values(store, 11.0)
    refresh = publisher.chain.reveal()
    assert refresh is not None
    assert store.offer(record, refresh, 300.0, 12.0) is Outcome.REFRESHED
    assert values(store, 12.0) == [b"1"]


def test_a_refresh_extends_once() -> None:
    """A refresh gives one more lifetime from its first arrival; repeating it gives nothing."""
    store, publisher = RecordStore(), Publisher()
    record = publisher.sign()
    offer(store, record, 0.0)
    refresh = publisher.chain.reveal()
    assert refresh is not None
    prefix = record.peer_id[:8]
    assert store.refresh(KEY, prefix, record.version, refresh, 300.0, 5.0) is Outcome.REFRESHED
    assert store.refresh(KEY, prefix, record.version, refresh, 300.0, 9.0) is Outcome.KNOWN
    assert values(store, 14.9)
    assert not values(store, 15.0)
    forged = Refresh(refresh.step + 1, refresh.link)
    assert store.refresh(KEY, prefix, record.version, forged, 300.0, 9.0) is Outcome.REFUSED
    assert store.refresh(KEY, b"nobody??", (1, 1), refresh, 300.0, 9.0) is Outcome.UNKNOWN


def test_who_reports_too_little_time_is_corrected() -> None:
    """A holder that understates what is left is outweighed by one that does not, up to the lifetime."""
    store, publisher = RecordStore(), Publisher()
    record = publisher.sign()
    offer(store, record, 0.0, remaining=0.5)
    assert not values(store, 1.0)
    offer(store, record, 1.0, remaining=9.0)
    assert values(store, 9.9)
    assert not values(store, 10.0)


def test_a_bad_signature_is_refused() -> None:
    """A record that its key did not sign is not kept."""
    store = RecordStore()
    record = Publisher().sign()
    forged = SignedRecord(
        record.key,
        record.public_key,
        record.peer_id,
        9,
        9,
        record.lifetime,
        record.anchor,
        b"forged",
        record.encoded[:-64] + bytes(64),
    )
    assert offer(store, forged, 0.0) is Outcome.REFUSED
    assert not len(store)


def test_pages_cover_everything_once() -> None:
    """Reading page after page gives every live record once, in order, and the entries survive encoding."""
    store = RecordStore()
    ids = set()
    for _ in range(25):
        record = Publisher().sign()
        offer(store, record, 0.0)
        ids.add(record.peer_id[:8])
    offer(store, Publisher().sign(lifetime=1.0), 0.0)
    cursor, seen, pages = b"", [], 0
    while True:
        entries, cursor = store.page(KEY, cursor, 7, 2.0)
        encoded = b"".join(entry.encode() for entry in entries)
        assert len(encoded) == ENTRY_BYTES * len(entries)
        decoded = decode_entries(encoded)
        assert decoded is not None
        seen += [entry.prefix for entry in decoded]
        pages += 1
        if not cursor:
            break
    assert seen == sorted(ids)
    assert pages == 4
    assert decode_entries(b"x") is None


def test_equal_digests_mean_equal_records() -> None:
    """Two stores with the same versions have the same digest, in whatever order they got them."""
    one, other = RecordStore(), RecordStore()
    records = [Publisher().sign() for _ in range(5)]
    for record in records:
        offer(one, record, 0.0)
    for record in reversed(records):
        offer(other, record, 3.0)
    assert one.summary(KEY, 4.0) == other.summary(KEY, 4.0)
    publisher = Publisher()
    offer(one, publisher.sign(1), 4.0)
    offer(other, publisher.sign(2), 4.0)
    assert one.summary(KEY, 5.0) != other.summary(KEY, 5.0)


def test_memory_is_bounded() -> None:
    """A full key, or a full store, refuses more until something expires; old tombstones make room."""
    store = RecordStore(max_records=4, max_records_per_key=3)
    for _ in range(3):
        assert offer(store, Publisher().sign(), 0.0) is Outcome.NEW
    assert offer(store, Publisher().sign(), 0.0) is Outcome.REFUSED
    assert offer(store, Publisher().sign(), 10.0) is Outcome.NEW
    assert len(store) == 1


def test_watchers_hear_of_versions_and_refreshes() -> None:
    """A watcher is called for a new version and for each refresh, and no more once it has stopped."""
    store, publisher = RecordStore(), Publisher()
    heard: list[StoredRecord] = []
    stop = store.watch(KEY, heard.append)
    record = publisher.sign()
    offer(store, record, 0.0)
    offer(store, record, 1.0)
    refresh = publisher.chain.reveal()
    assert refresh is not None
    store.refresh(KEY, record.peer_id[:8], record.version, refresh, 10.0, 2.0)
    assert len(heard) == 2
    stop()
    offer(store, publisher.sign(2), 3.0)
    assert len(heard) == 2


def test_tombstones_are_forgotten_in_the_end() -> None:
    """Ten minutes after it expired a record is gone from memory."""
    store = RecordStore()
    offer(store, Publisher().sign(), 0.0)
    store.purge(500.0)
    assert len(store) == 1
    store.purge(611.0)
    assert not len(store)
    assert not list(store.keys())
