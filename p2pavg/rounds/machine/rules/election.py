"""Who leads: rendezvous hashing over the peers that could. Pure."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from p2pavg.rounds.protocol.ballot import PeerId


@lru_cache(maxsize=256)
def rendezvous(run: bytes, epoch: int, peers: tuple[PeerId, ...]) -> PeerId | None:
    """The peer with the highest hash of (run, epoch, peer); None of none.

    A peer that is not in somebody's view changes that somebody's choice only if it is the choice (Thaler and
    Ravishankar 1998), so slightly different views usually name the same leader.
    """
    seed = run + epoch.to_bytes(8, "big")
    return max(peers, key=lambda peer: _score(seed, peer), default=None)


@lru_cache(maxsize=4096)
def _score(seed: bytes, peer: PeerId) -> bytes:
    return hashlib.sha256(seed + peer).digest() + peer
