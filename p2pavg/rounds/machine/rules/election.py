"""The choice of a leader: rendezvous hashing over the peers that can lead. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from p2pavg.rounds.protocol.ballot import PeerId

MOST_KEPT = 4096  # scores of one epoch


def rendezvous(run: bytes, epoch: int, peers: Iterable[PeerId]) -> PeerId | None:
    """The peer with the highest hash of (run, epoch, peer); None where there are no peers.

    A peer that is missing from a view changes the choice of that view only if the peer is the choice (Thaler
    and Ravishankar 1998), so slightly different views usually name the same leader.
    """
    return max(peers, key=_scores(run + epoch.to_bytes(8, "big")).__getitem__, default=None)


class _Scores(dict[PeerId, bytes]):
    """The hashes of peers that were asked for."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def __missing__(self, peer: PeerId) -> bytes:
        if len(self) >= MOST_KEPT:
            self.clear()
        score = self[peer] = hashlib.sha256(self._seed + peer).digest() + peer
        return score


@lru_cache(maxsize=4)
def _scores(seed: bytes) -> _Scores:
    """Of the last epochs: all peers are asked about whenever one of them comes or goes."""
    return _Scores(seed)
