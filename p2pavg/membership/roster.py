"""Which peers of a run this one keeps in view, and what is due for each: decisions without I/O."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from p2pavg.membership.circles import Circle, draw
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table.beat import DIGEST_BYTES, SENDER_BYTES
from p2pavg.membership.table.records.entries import PREFIX_BYTES, StoredRecord

FULL_VIEW = 128
LARGE_VIEW = 32
SAMPLE_SHARE = 0.75  # of the limit: below, the run has become one that is seen whole


@dataclass(slots=True)
class SeenPeer:
    """A peer in view: what it said, how fresh that is, when to send it the next beat."""

    info: PeerInfo
    held: StoredRecord
    beat_due: float
    rank: int


class Roster:
    """Peers by id. Beyond `limit` it keeps a sample: those with the smallest hash of the pair.

    The pair's hash is the same on both sides, so that mostly whoever keeps me in view is kept in view by me.
    """

    def __init__(self, own_id: bytes, lifetime: float, *, limit: int = FULL_VIEW) -> None:
        self.members: dict[bytes, SeenPeer] = {}
        self._own_id = own_id
        self._own_prefix = own_id[:PREFIX_BYTES]
        self._lifetime = lifetime
        self._limit = limit
        self._rng = random.Random()
        self._sampled = False
        self._combined = 0  # of the members' digests
        self._highest: int | None = None  # rank of a member; None: to be found anew
        self._circle: Circle | None = None  # the same
        self._by_sender: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_sample(self) -> bool:
        """Whether there are, or may be, peers that are not in view. A sample that lost some is still one."""
        count = len(self.members)
        if count >= self._limit:
            self._sampled = True
        elif count < SAMPLE_SHARE * self._limit:
            self._sampled = False
        return self._sampled

    @property
    def interval(self) -> float:
        """Seconds between two beats to one peer: a third of the lifetime, less often when there are many."""
        return self._lifetime * (1 / 3 if len(self.members) <= LARGE_VIEW else 0.45)

    def wants(self, prefix: bytes) -> bool:
        """Whether a peer whose id starts with `prefix` (8 bytes) has a place here."""
        if prefix == self._own_prefix:
            return False
        return len(self.members) < self._limit or self._rank(prefix) <= self._highest_rank()

    def put(self, info: PeerInfo, held: StoredRecord, now: float) -> bool:
        """Add or update a peer; False when there is no place for it. It may take another's place."""
        peer_id = info.peer_id
        known = self.members.get(peer_id)
        if known is not None:
            self._combined ^= known.held.digest ^ held.digest
            known.info, known.held = info, held
            return True
        if not self.wants(peer_id[:PREFIX_BYTES]):
            return False
        if len(self.members) >= self._limit:
            self.remove(max(self.members, key=lambda i: self.members[i].rank))
        due = now + self._rng.uniform(0.0, self.interval)
        self.members[peer_id] = SeenPeer(info, held, due, self._rank(peer_id[:PREFIX_BYTES]))
        self._highest = self._circle = None
        self._by_sender.setdefault(peer_id[:SENDER_BYTES], set()).add(peer_id)
        self._combined ^= held.digest
        return True

    def remove(self, peer_id: bytes) -> None:
        self._combined ^= self.members.pop(peer_id).held.digest
        self._highest = self._circle = None
        same = self._by_sender[peer_id[:SENDER_BYTES]]
        same.discard(peer_id)
        if not same:
            del self._by_sender[peer_id[:SENDER_BYTES]]

    def expire(self, now: float) -> list[bytes]:
        """Remove and return the peers whose records ran out."""
        gone = [peer_id for peer_id, member in self.members.items() if member.held.expires <= now]
        for peer_id in gone:
            self.remove(peer_id)
        return gone

    def senders(self, prefix: bytes) -> list[SeenPeer]:
        """The members whose id starts with these four bytes."""
        return [self.members[peer_id] for peer_id in self._by_sender.get(prefix, ())]

    @property
    def is_in_circles(self) -> bool:
        """Whether members pass on what they heard, instead of each beating to all: when they are many, and
        each sees all.
        """
        return len(self.members) > LARGE_VIEW and not self.is_sample

    @property
    def circle(self) -> Circle:
        """Whom this peer tells of itself, and whom of these."""
        if self._circle is None:
            self._circle = draw(self._own_id, self.members)
        return self._circle

    def due(self, now: float) -> list[SeenPeer]:
        """The members that a beat must go to now; the next one is then due an interval later."""
        found = [member for member in self.members.values() if member.beat_due <= now]
        for member in found:
            member.beat_due = max(member.beat_due + self.interval, now)
        return found

    def overdue(self, now: float) -> list[SeenPeer]:
        """The members that this peer should have heard from by now: others may have."""
        patience = 1.25 * self.interval
        return [m for m in self.members.values() if now - m.held.refreshed > patience]

    def fresh(self, now: float, count: int) -> list[SeenPeer]:
        """Up to `count` random members that were heard from lately."""
        patience = 1.25 * self.interval
        heard = [m for m in self.members.values() if now - m.held.refreshed <= patience]
        return self._rng.sample(heard, min(count, len(heard)))

    def digest(self, own: StoredRecord | None, also: int = 0) -> bytes:
        """What tells two peers whether they see the same records, this peer's own included. also: the digest
        of what else they must agree on.
        """
        combined = self._combined ^ also ^ (own.digest if own is not None else 0)
        return combined.to_bytes(8, "big")[-DIGEST_BYTES:]

    def is_among_closest(self, key: bytes, own_id: bytes, count: int) -> bool:
        """Whether fewer than `count` peers' ids are closer to `key` than this peer's, as far as a sample of
        them tells.
        """
        target = int.from_bytes(key, "big")
        own = int.from_bytes(own_id, "big") ^ target
        closer = sum(1 for peer_id in self.members if int.from_bytes(peer_id, "big") ^ target < own)
        return closer < count * min(1.0, self._share())

    def _share(self) -> float:
        """Which part of the run is in view: ranks are spread evenly, and a sample has the lowest."""
        return self._highest_rank() / 2**64 if self.is_sample else 1.0

    def _rank(self, prefix: bytes) -> int:
        low, high = sorted((prefix, self._own_prefix))
        return int.from_bytes(hashlib.blake2b(low + high, digest_size=8).digest(), "big")

    def _highest_rank(self) -> int:
        if self._highest is None:
            self._highest = max((member.rank for member in self.members.values()), default=0)
        return self._highest


def prefixes(members: Iterable[SeenPeer]) -> list[bytes]:
    return [member.info.peer_id[:PREFIX_BYTES] for member in members]
