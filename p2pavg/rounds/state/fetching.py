"""Which chunk comes from which donor: pure bookkeeping of one download from several donors."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from p2pavg.rounds.state.manifest import Manifest

LEAST = 4  # chunks on their way from a donor, and
FILL = 25e6  # bytes/s that its round trip is filled with: else a far one would wait for questions
AHEAD_S = 0.5  # so much of what a donor sends, besides what fills its link, is on its way: all end together
MEASURED_S = 2.0  # its rate is that of about the last two seconds
MOST_TIMES = 2  # donors that a chunk is asked of at a time, the second one when it has nothing else to do


class DonorSource:
    """One donor: what it can serve, what it owes, and how fast it is."""

    def __init__(self, can: bytearray) -> None:
        self.can = can
        self.coming: dict[int, None] = {}  # in the order in which they were asked for
        self.rate = 0.0  # chunks per second
        self._since: float | None = None
        self._count = 0
        self._heard_at = 0.0  # when one of its chunks came last, or it was asked while it owed none

    def asked(self, chunks: Iterable[int], now: float) -> None:
        """It owes these chunks, too."""
        if not self.coming:
            self._heard_at = now
        self.coming.update(dict.fromkeys(chunks))

    def late(self, now: float) -> int:
        """How many of its last chunks it will take longer for than what it owes is measured by; all, once it
        brought none for as long.
        """
        if now - self._heard_at > AHEAD_S:
            return len(self.coming)
        return max(0, len(self.coming) - int(self.rate * AHEAD_S)) if self.rate else 0

    def arrived(self, now: float) -> None:
        """One of its chunks is verified."""
        self._heard_at = now
        if self._since is None:
            self._since = now
            return
        self._count += 1
        passed = now - self._since
        if passed > 0:
            self.rate = self._count / passed
        if passed > MEASURED_S:
            self._since, self._count = now - passed / 2, self._count // 2

    def allowance(self, rtt_s: float, chunk_bytes: int) -> int:
        """How many chunks may be on their way from it: enough for its link, and little more."""
        least = LEAST + int(FILL * rtt_s / chunk_bytes)
        return max(least, math.ceil(self.rate * (2 * rtt_s + AHEAD_S)) + 1)


class Fetching:
    """Donors work in parallel, each as fast as it can; a lost donor's chunks go to the others, and so do the
    last ones of a slow donor.
    """

    def __init__(
        self, chunks: int, chunk_bytes: int, donors: Mapping[bytes, bytearray], have: bytes | bytearray = b""
    ) -> None:
        """donors: by chunk, whether it can serve it. have: by chunk, whether it is here already."""
        self._chunk_bytes = chunk_bytes
        self.share = 1.0  # of what its donors' links can hold: something else is to come first
        self.have = bytearray(have) or bytearray(chunks)
        self.left = chunks - sum(self.have)  # not yet verified
        self.moved = 0  # verified since this download began, and asked for twice
        self._sources = {donor: DonorSource(can) for donor, can in donors.items()}
        self._apart = False  # they are asked one by one
        self._pool = deque(chunk for chunk in range(chunks) if not self.have[chunk])
        self._asked = Counter[int]()  # of how many donors, by chunk on its way

    @property
    def donors(self) -> tuple[bytes, ...]:
        """Those still in use."""
        return tuple(self._sources)

    def stuck(self) -> bool:
        """Chunks are left that no donor can serve."""
        cans = [source.can for source in self._sources.values()]
        if any(map(all, cans)):
            return False
        return any(not any(can[chunk] for can in cans) for chunk in self._pool)

    def ask(self, donor: bytes, rtt_s: float, now: float) -> list[int]:
        """The chunks to ask this donor for now; marks them so. Empty: it has enough to do."""
        source = self._sources.get(donor)
        if source is None or (self._apart and donor != self._first()):
            return []
        room = max(1, int(self.share * source.allowance(rtt_s, self._chunk_bytes))) - len(source.coming)
        chosen: list[int] = []
        passed: list[int] = []
        while self._pool and len(chosen) < room:
            chunk = self._pool.popleft()
            (chosen if source.can[chunk] else passed).append(chunk)
        self._pool.extendleft(reversed(passed))
        if not chosen and not source.coming and not self._pool:
            chosen = self._overdue(source, now)[:room]
        source.asked(chosen, now)
        self._asked.update(chosen)
        return chosen

    def apart(self) -> None:
        """One of them sent something wrong, and may have sent it in the place of another: from now on only
        one at a time is asked, the first that has something to give.
        """
        self._apart = True

    @property
    def one(self) -> bytes | None:
        """Who alone may be asked now; None: all may, or nobody has anything to give."""
        return self._first() if self._apart else None

    def _first(self) -> bytes | None:
        owing = (donor for donor, source in self._sources.items() if source.coming)
        able = (d for d, source in self._sources.items() if any(source.can[c] for c in self._pool))
        return next(owing, None) or next(able, None)

    def _overdue(self, source: DonorSource, now: float) -> list[int]:
        """What the donor that owes most will be long in sending, the last first, or all of a few chunks: all
        else comes soon, and would come twice. Who sent what packs to nothing owes much for a moment.
        """
        most = max(self._sources.values(), key=lambda other: len(other.coming))
        owed = len(most.coming)
        last = islice(reversed(most.coming), owed if owed <= LEAST else most.late(now))
        return [c for c in last if source.can[c] and self._asked[c] < MOST_TIMES]

    def verified(self, chunk: int, now: float) -> None:
        """A chunk is in place and its hash is right."""
        self.left -= 1 - self.have[chunk]
        self.have[chunk] = 1
        for source in self._sources.values():
            if source.coming.pop(chunk, chunk) is None:
                source.arrived(now)
        self._asked.pop(chunk, None)

    def wrong(self, chunk: int) -> None:
        """What is in place is not right, though it may have been."""
        self.left += self.have[chunk]
        self.have[chunk] = 0

    def owing(self, chunk: int) -> list[bytes]:
        """Whom it was asked of: one of these sent it."""
        return [donor for donor, source in self._sources.items() if chunk in source.coming]

    def coming(self, donor: bytes) -> int:
        """Chunks on their way from this donor."""
        source = self._sources.get(donor)
        return 0 if source is None else len(source.coming)

    def rate(self, donor: bytes) -> float:
        """Bytes/s that came from this donor lately and were right; 0.0: not known."""
        source = self._sources.get(donor)
        return 0.0 if source is None else source.rate * self._chunk_bytes

    def drop(self, donor: bytes) -> None:
        """The donor is lost or wrong: others take over what it owed."""
        self.again(donor)
        self._sources.pop(donor, None)

    def again(self, donor: bytes) -> None:
        """What is on its way from this donor is lost: ask for it again, whoever is asked."""
        source = self._sources.get(donor)
        if source is not None:
            for chunk in sorted(source.coming, reverse=True):
                self._asked[chunk] -= 1
                if not self._asked[chunk]:
                    self._pool.appendleft(chunk)
            source.coming.clear()

    def restart(self) -> None:
        """Everything that is on its way will not come: ask again for all that is not verified."""
        for source in self._sources.values():
            source.coming.clear()
        self._asked.clear()
        self._pool = deque(chunk for chunk in range(len(self.have)) if not self.have[chunk])


def same(primary: Manifest, other: Manifest) -> bytearray:
    """By chunk, whether both have the same bytes."""
    found = bytearray(primary.chunks)
    if (primary.total_bytes, primary.meta_bytes) == (other.total_bytes, other.meta_bytes):
        for chunk in range(primary.chunks):
            found[chunk] = primary.hash_of(chunk) == other.hash_of(chunk)
    return found


def choose(manifests: Mapping[bytes, Manifest], doubts: Callable[[bytes], int]) -> bytes:
    """The donor whose manifest counts: of those that are doubted least the one that most donors share, of
    these the newest; the results since are there for each. Not for an empty map.
    """
    roots = Counter(manifest.root for manifest in manifests.values())

    def rank(donor: bytes) -> tuple[int, int, int, bytes]:
        manifest = manifests[donor]
        return -doubts(donor), roots[manifest.root], manifest.epoch, donor

    return max(manifests, key=rank)
