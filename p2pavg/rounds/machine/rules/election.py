"""The choice of a leader: rendezvous hashing over the peers that can lead. Pure."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from p2pavg.rounds.protocol.ballot import PeerId


@lru_cache(maxsize=256)
def rendezvous(run: bytes, epoch: int, peers: tuple[PeerId, ...]) -> PeerId | None:
    """The peer with the highest hash of (run, epoch, peer); None where there are no peers.

    A peer that is missing from a view changes the choice of that view only if the peer is the choice (Thaler
    and Ravishankar 1998), so slightly different views usually name the same leader.
    """
    seed = run + epoch.to_bytes(8, "big")
    return max(peers, key=lambda peer: _score(seed, peer), default=None)


@lru_cache(maxsize=4096)
def _score(seed: bytes, peer: PeerId) -> bytes:
    return hashlib.sha256(seed + peer).digest() + peer
