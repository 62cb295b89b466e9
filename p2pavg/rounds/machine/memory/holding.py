"""The ballot that a member holds, and how far the member is in that ballot."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.plan import Plan
from p2pavg.rounds.machine.rules.stalls import NOTHING, TransferWatch
from p2pavg.rounds.protocol.ballot import Ballot, Held, Note, PeerId, Stage
from p2pavg.rounds.protocol.messages import Committed
from p2pavg.rounds.protocol.roles import Seat

MOST_TOLD = 63  # members that one tells of its BEGIN: all others, in as large groups as a run has
FEW_TOLD = 15  # the same in larger groups: a majority of these finds a leader that lies all the same


@dataclass(slots=True)
class Holding:
    """The ballot that this member holds."""

    ballot: Ballot
    members: tuple[Seat, ...]
    rank: int
    plan: Plan
    proposed_at: float
    transfer: int = field(init=False)
    voter: bool = field(init=False)
    voters: tuple[PeerId, ...] = field(init=False)
    voting: frozenset[PeerId] = field(init=False)  # the same, to look one up
    stage: Stage = Stage.OPEN
    frozen: bool = False  # a successor was told that this peer is not DONE: this peer must not become DONE
    orphaned: bool = False  # the link to the leader broke; the leader may come back as another process
    wait: int = 0  # the wait for which this peer said READY, and did not take READY back
    declared: dict[int, tuple[int, float]] = field(default_factory=dict)  # wait -> (samples, weight)
    begun: bool = False
    begun_at: float = 0.0
    told: bytes = b""  # the digest of the BEGIN that the leader sent here
    # Voter -> the digest of the BEGIN that this voter got, as it says.
    told_others: dict[PeerId, bytes] = field(default_factory=dict)
    all_begun_at: float = 0.0  # when the last voter was heard to have begun: the leader tells each alone
    # Members that say that the leader keeps rounds waiting.
    kept_waiting: set[PeerId] = field(default_factory=set)
    # Who says that the result which is whole here was committed.
    applied: set[PeerId] = field(default_factory=set)
    others_asked: int = 0  # times that a voter beside the leader was asked
    inquiries: int = 0  # times that voters were asked because nobody decides
    done_at: float = 0.0
    ready: bool = False  # whether the training thread was at a boundary when the round began
    weights: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    note: Note = b""  # all members step by this note, once begun
    digests: tuple[bytes, ...] = ()
    # Who told that the ballot is committed, while the copy here is not whole yet (without a vote).
    fact: tuple[PeerId, Committed] | None = None
    watch: TransferWatch | None = None
    told_at: float = 0.0
    asked: set[PeerId] = field(
        default_factory=set
    )  # peers that were asked what became of the ballot, and whose answers count
    stalled_told: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), NOTHING)

    def __post_init__(self) -> None:
        self.transfer = self.ballot.transfer
        self.voter = self.members[self.rank].voter
        self.voters = tuple(seat.peer for seat in self.members if seat.voter)
        self.voting = frozenset(self.voters)

    def is_told_otherwise(self, me: PeerId) -> bool:
        """Whether most other members, the leader aside, were told of another round than this member.

        If so, the leader lies. Of two rounds that a leader tells of, at most one has no member for which this
        is true. One member that lies about what it was told changes nothing, as long as there are two others.
        """
        otherwise = {peer for peer, digest in self.told_others.items() if digest != self.told}
        if not self.begun or not otherwise:
            return False
        others = self.tellers.intersection(self.seconds(me))
        return len(others) > 1 and 2 * len(otherwise & others) > len(others)

    @property
    def relieves(self) -> bool:
        """Whether most other members say that the leader keeps rounds waiting: then the leader leads no
        more.
        """
        me, leader = self.members[self.rank].peer, self.ballot.leader
        heard = {me, *self.tellers} if me != leader else set(self.voters)
        others = [peer for peer in self.voters if peer != leader and peer in heard]
        return 2 * len(self.kept_waiting.intersection(others)) > len(others)

    def is_applied(self, me: PeerId) -> bool:
        """Whether most other voters, the leader aside, and two at least, say that the result here was
        committed: the leader has told them, and not this peer.
        """
        others = self.seconds(me)
        known = len(self.applied.intersection(others))
        return known > 1 and 2 * known > len(others)

    def seconds(self, me: PeerId) -> list[PeerId]:
        """The voters beside the leader and this peer."""
        others = list(self.voters)
        for peer in self.voting.intersection((me, self.ballot.leader)):
            others.remove(peer)
        return others

    @property
    def next_members(self) -> list[PeerId]:
        """The other members, from the next rank on; after the last rank comes the first."""
        return [seat.peer for seat in (*self.members[self.rank + 1 :], *self.members[: self.rank])]

    @property
    def told_ones(self) -> list[PeerId]:
        """Those whom this member tells of its BEGIN."""
        following = range(self.rank + 1, self.rank + 1 + self._most_told)
        return [self.members[rank % len(self.members)].peer for rank in following]

    @property
    def tellers(self) -> frozenset[PeerId]:
        """Those who tell this member of their BEGIN."""
        before = range(self.rank - self._most_told, self.rank)
        return frozenset(self.members[rank % len(self.members)].peer for rank in before)

    @property
    def _most_told(self) -> int:
        others = len(self.members) - 1
        return others if others <= MOST_TOLD else FEW_TOLD

    def moves(self, now: float) -> bool:
        """Whether missing data still comes."""
        return self.watch is not None and not any(self.watch.lagging(now))

    def described(self) -> Held:
        return Held(
            self.ballot, self.stage, self.begun, self.digests, self.voters, self.weights, self.samples
        )
