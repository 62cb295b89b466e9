"""One attempt that this peer leads, and what the members said of the attempt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2pavg.plan import Plan
from p2pavg.rounds.machine.memory.arrivals import Arrivals
from p2pavg.rounds.machine.rules.stalls import NOTHING
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
    voting: Mapping[PeerId, None] = field(init=False)  # the voters, in rank order
    promised: set[PeerId] = field(default_factory=set)
    slowest: PeerId | None = None  # of those that are not ready, when they were last compared
    ready: dict[PeerId, Ready] = field(default_factory=dict)  # members whose wait stands
    # Voter -> samples that it had told before the proposal.
    told: dict[PeerId, int] = field(default_factory=dict)
    begun: bool = False
    begun_at: float = 0.0
    weights: tuple[float, ...] = ()  # per rank; empty before BEGIN
    samples: tuple[int, ...] = ()
    # By stage of the plan from the second on: who has all that it needs for what it sends in that stage; most
    # of those count that reduce.
    gathered_at: tuple[Arrivals, ...] = field(init=False)
    done: dict[PeerId, tuple[bytes, ...]] = field(default_factory=dict)
    done_at: Arrivals = field(init=False)  # who is DONE; most voters count
    # Voter -> when it last said that it works on the round.
    heard: dict[PeerId, float] = field(default_factory=dict)
    stalls: dict[int, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    # Member -> the members to which it has no link, as it says.
    unlinked: dict[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether nobody votes but the leader."""
        return len(self.voting) == 1

    def wait(self, peer: PeerId) -> int:
        """The wait for which the member said READY, and did not take READY back; 0: none. After BEGIN: the
        wait that
        is counted."""
        return self.ready[peer].wait if peer in self.ready else 0

    def __post_init__(self) -> None:
        self.voting = dict.fromkeys(itertools.compress(self.members, self.voters))
        ranks = {rank for part in self.plan.parts for rank in (part.owner, *part.deputies)}
        reducing = [self.members[rank] for rank in ranks]
        self.gathered_at = tuple(Arrivals(reducing) for _ in range(NOTHING))
        self.done_at = Arrivals(self.voting)
