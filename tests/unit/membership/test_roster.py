from __future__ import annotations

import hashlib
import itertools

from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.roster import Roster
from p2pavg.membership.table.record import Refresh, SignedRecord
from p2pavg.membership.table.records.entries import StoredRecord

OWN = b"o" * 20


def peer(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:20]


def held(peer_id: bytes, now: float = 0.0, sequence: int = 1) -> StoredRecord:
    record = SignedRecord(bytes(20), bytes(32), peer_id, 1, sequence, 15.0, b"a" * 10, b"", b"")
    digest = int.from_bytes(hashlib.sha256(peer_id + bytes([sequence])).digest()[:8], "big")
    return StoredRecord(record, Refresh(0, b"a" * 10), now, now + 15.0, digest)


def filled(count: int, limit: int = 128, own: bytes = OWN) -> Roster:
    roster = Roster(own, 15.0, limit=limit)
    for number in range(count):
        roster.put(PeerInfo(peer(number)), held(peer(number)), 0.0)
    return roster


def test_every_member_gets_one_beat_an_interval() -> None:
    """Over three intervals each member is due three times, never twice within one."""
    roster = filled(20)
    sent: dict[bytes, list[float]] = {}
    steps = int(3 * roster.interval / 0.25)
    for step in range(1, steps + 1):
        for member in roster.due(step * 0.25):
            sent.setdefault(member.info.peer_id, []).append(step * 0.25)
    assert len(sent) == 20
    assert all(len(times) == 3 for times in sent.values())
    gaps = [later - earlier for times in sent.values() for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= roster.interval - 0.25


def test_two_beats_may_be_lost() -> None:
    """The interval leaves time for at least two beats within a lifetime, in small and large views."""
    for count in (3, 100):
        assert 2 * filled(count).interval < 15.0


def test_the_silent_are_overdue_before_they_expire() -> None:
    """A member not heard from for over an interval is overdue; others are fresh; in the end it expires."""
    roster = filled(3)
    silent = peer(0)
    for number in (1, 2):
        roster.members[peer(number)].held = held(peer(number), now=8.0)
    assert [m.info.peer_id for m in roster.overdue(8.0)] == [silent]
    assert {m.info.peer_id for m in roster.fresh(8.0, 5)} == {peer(1), peer(2)}
    assert roster.expire(14.9) == []
    assert roster.expire(15.0) == [silent]
    assert len(roster) == 2


def test_a_digest_tells_views_apart() -> None:
    """Equal members in any order give equal digests; another member or another version does not."""
    one = filled(5)
    other = Roster(OWN, 15.0)
    for number in reversed(range(5)):
        other.put(PeerInfo(peer(number)), held(peer(number)), 3.0)
    assert one.digest(None) == other.digest(None)
    other.put(PeerInfo(peer(2)), held(peer(2), sequence=2), 4.0)
    assert one.digest(None) != other.digest(None)
    assert filled(6).digest(None) != one.digest(None)


def test_both_ends_of_a_pair_agree_on_the_view() -> None:
    """In a sampled run most of those whom a peer keeps in view keep it in view."""
    ids = [peer(number) for number in range(80)]
    rosters = {i: Roster(i, 15.0, limit=20) for i in ids}
    for owner, roster in rosters.items():
        for other in ids:
            if other != owner:
                roster.put(PeerInfo(other), held(other), 0.0)
        assert len(roster) == 20
    seen = [(a, b) for a, b in itertools.permutations(ids, 2) if b in rosters[a].members]
    mutual = sum(1 for a, b in seen if a in rosters[b].members)
    assert mutual >= 0.7 * len(seen)
    assert all(any(i in roster.members for roster in rosters.values()) for i in ids)


def test_only_the_closest_stay_in_the_table() -> None:
    """As many peers as wanted, and no more, count themselves among the closest to a key."""
    ids = [peer(number) for number in range(50)]
    key = peer(999)
    chosen = 0
    for owner in ids:
        roster = Roster(owner, 15.0)
        for other in ids:
            roster.put(PeerInfo(other), held(other), 0.0)
        chosen += roster.is_among_closest(key, owner, 16)
    assert chosen == 16


def test_it_never_lists_itself() -> None:
    """A record of the own id is no member."""
    roster = filled(0)
    assert not roster.put(PeerInfo(OWN), held(OWN), 0.0)
