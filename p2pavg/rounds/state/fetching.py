"""Which chunk comes from which donor: pure bookkeeping of one download from several donors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from p2pavg.rounds.state.manifest import HASH_BYTES, Manifest

LEAST_COMING = 8  # chunks on their way from one donor, however near it is
COMING_PER_S = 100  # of its round-trip time: more of them; 100 MB/s of each donor, and the least on top


def allowance(rtt_s: float) -> int:
    """How many chunks may be on their way from a donor: enough for its link, and no more, so that all donors
    end together.
    """
    return LEAST_COMING + int(COMING_PER_S * rtt_s)


class Fetching:
    """Donors work in parallel, each as fast as it can; a lost donor's chunks go to the others.

    Every chunk is checked against the hashes of one manifest, the primary's. Another donor may serve the
    chunks whose
    hash is the same in its own manifest.
    """

    def __init__(self, primary: Manifest, donors: Mapping[bytes, Manifest]) -> None:
        self.manifest = primary
        self._have = bytearray(primary.chunks)
        self.left = primary.chunks  # chunks not yet verified
        self._can: dict[bytes, bytearray] = {d: _same(primary, m) for d, m in donors.items()}
        self._pool = deque(range(primary.chunks))
        self._coming: dict[bytes, set[int]] = {donor: set() for donor in donors}
        self._from: dict[int, bytes] = {}

    @property
    def donors(self) -> tuple[bytes, ...]:
        """Those still in use."""
        return tuple(self._can)

    def stuck(self) -> bool:
        """Chunks are left that no donor can serve."""
        if any(map(all, self._can.values())):
            return False
        return any(not any(can[chunk] for can in self._can.values()) for chunk in self._pool)

    def ask(self, donor: bytes, allowed: int) -> list[int]:
        """The chunks to ask this donor for now, so that `allowed` are coming; marks them so. Empty: it has
        enough to do.
        """
        can, coming = self._can.get(donor), self._coming.get(donor)
        if can is None or coming is None:
            return []
        chosen: list[int] = []
        passed: list[int] = []
        while self._pool and len(chosen) + len(coming) < allowed:
            chunk = self._pool.popleft()
            (chosen if can[chunk] else passed).append(chunk)
        self._pool.extendleft(reversed(passed))
        for chunk in chosen:
            coming.add(chunk)
            self._from[chunk] = donor
        return chosen

    def verified(self, chunk: int) -> None:
        """A chunk is in place and its hash is right."""
        self.left -= 1 - self._have[chunk]
        self._have[chunk] = 1
        donor = self._from.pop(chunk, None)
        if donor is not None and donor in self._coming:
            self._coming[donor].discard(chunk)

    def wrong(self, chunk: int) -> bytes | None:
        """A chunk has the wrong hash: who sent it, so that it can be dropped."""
        return self._from.get(chunk)

    def coming(self, donor: bytes) -> int:
        """Chunks on their way from this donor."""
        return len(self._coming.get(donor, ()))

    def drop(self, donor: bytes) -> None:
        """The donor is lost or wrong: others take over what it owed."""
        self._can.pop(donor, None)
        for chunk in sorted(self._coming.pop(donor, ())):
            self._from.pop(chunk, None)
            self._pool.appendleft(chunk)

    def restart(self) -> None:
        """Everything that is on its way will not come: ask again for all that is not verified."""
        for coming in self._coming.values():
            coming.clear()
        self._from.clear()
        self._pool = deque(chunk for chunk in range(len(self._have)) if not self._have[chunk])


def _same(primary: Manifest, other: Manifest) -> bytearray:
    same = bytearray(primary.chunks)
    if (other.total_bytes, other.meta_bytes, other.lineage) != (
        primary.total_bytes,
        primary.meta_bytes,
        primary.lineage,
    ):
        return same
    for chunk in range(primary.chunks):
        at = chunk * HASH_BYTES
        same[chunk] = primary.hashes[at : at + HASH_BYTES] == other.hashes[at : at + HASH_BYTES]
    return same


def choose(manifests: Mapping[bytes, Manifest]) -> bytes:
    """The donor whose manifest counts: of the newest epoch, the one that most donors share. Not for an empty
    map.
    """
    newest = max(manifest.epoch for manifest in manifests.values())
    roots = [m.root for m in manifests.values() if m.epoch == newest]
    return max(
        (donor for donor, m in manifests.items() if m.epoch == newest),
        key=lambda donor: (roots.count(manifests[donor].root), donor),
    )
