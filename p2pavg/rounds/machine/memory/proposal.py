"""One attempt that this peer leads, and what its members said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pavg.plan import Plan
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.messages import Ready


@dataclass(slots=True)
class Proposal:
    """One attempt that this peer leads."""

    ballot: Ballot
    members: tuple[PeerId, ...]  # rank order
    voters: tuple[bool, ...]
    plan: Plan
    asked_at: float
    promised: set[PeerId] = field(default_factory=set)
    ready: dict[PeerId, Ready] = field(default_factory=dict)  # whose wait stands
    told: dict[PeerId, int] = field(default_factory=dict)  # samples that each voter had told before
    begun: bool = False
    begun_at: float = 0.0
    weights: tuple[float, ...] = ()  # once begun
    samples: tuple[int, ...] = ()
    gathered_at: dict[PeerId, float] = field(default_factory=dict)  # when all contributions were there
    done: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict)
    done_at: dict[PeerId, float] = field(default_factory=dict)
    heard: dict[PeerId, float] = field(default_factory=dict)  # when a voter last said that it is at it
    stalls: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    unlinked: dict[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)  # to whom it says it has no link
    excused: dict[int, float] = field(default_factory=dict)  # ranks that cannot give all results: until when

    def wait(self, peer: PeerId) -> int:
        """For which it said READY, and did not take it back; 0: none. Once begun: the one that is counted."""
        return self.ready[peer].wait if peer in self.ready else 0

    @property
    def voting(self) -> list[PeerId]:
        return [peer for peer, voter in zip(self.members, self.voters, strict=True) if voter]
