"""The ballot that a member holds, and how far it is in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.plan import Plan
from p2pavg.rounds.machine.rules.stalls import TransferWatch
from p2pavg.rounds.protocol.ballot import Ballot, Held, Note, PeerId, Stage
from p2pavg.rounds.protocol.messages import Committed
from p2pavg.rounds.protocol.roles import Seat


@dataclass(slots=True)
class Holding:
    """The ballot that this member holds."""

    ballot: Ballot
    members: tuple[Seat, ...]
    rank: int
    plan: Plan
    proposed_at: float
    stage: Stage = Stage.OPEN
    frozen: bool = False  # a successor was told that we are not DONE: we must not become so
    orphaned: bool = False  # the link to its leader broke: that may come back as another process
    wait: int = 0  # for which we said READY, and did not take it back
    declared: dict[int, tuple[int, float]] = field(default_factory=dict)  # by wait: samples, weight
    begun: bool = False
    begun_at: float = 0.0
    told: bytes = b""  # a digest of BEGIN
    told_others: dict[PeerId, bytes] = field(default_factory=dict)  # by voter, as each says
    kept_waiting: set[PeerId] = field(default_factory=set)  # who says that its leader keeps rounds waiting
    done_at: float = 0.0
    ready: bool = False  # at the boundary when the round began
    weights: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    note: Note = b""  # all members step by this note, once begun
    digests: tuple[bytes, ...] = ()
    fact: tuple[PeerId, Committed] | None = None  # told so, but our copy is not whole yet (without a vote)
    watch: TransferWatch | None = None
    told_at: float = 0.0
    asked: set[PeerId] = field(
        default_factory=set
    )  # peers asked what became of the ballot: their answers count
    stalled_told: tuple[tuple[int, ...], tuple[int, ...], bool] = ((), (), False)

    @property
    def transfer(self) -> int:
        return self.ballot.transfer

    @property
    def voter(self) -> bool:
        return self.members[self.rank].voter

    @property
    def voters(self) -> tuple[PeerId, ...]:
        return tuple(seat.peer for seat in self.members if seat.voter)

    def is_told_otherwise(self, me: PeerId) -> bool:
        """Whether most others, the leader aside, were told of another round than this member.

        Then the leader lies. Of two rounds that it tells of, one at most has no such member. One other member
        that lies about what it was told changes nothing, as long as there are two others.
        """
        voters = [seat.peer for seat in self.members if seat.voter]
        others = [peer for peer in voters if peer not in (me, self.ballot.leader)]
        wrong = sum(self.told_others.get(peer, self.told) != self.told for peer in others)
        return self.begun and len(others) > 1 and 2 * wrong > len(others)

    @property
    def relieves(self) -> bool:
        """Whether most others say that its leader keeps rounds waiting: then that peer leads no more."""
        others = [peer for peer in self.voters if peer != self.ballot.leader]
        return 2 * len(self.kept_waiting.intersection(others)) > len(others)

    def moves(self, now: float) -> bool:
        """Whether the data that is missing still comes."""
        return self.watch is not None and not any(self.watch.lagging(now))

    def described(self) -> Held:
        return Held(
            self.ballot, self.stage, self.begun, self.digests, self.voters, self.weights, self.samples
        )
