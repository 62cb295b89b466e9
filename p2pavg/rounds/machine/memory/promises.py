"""The ballots that this peer promised, and the ballots of its own that may follow."""

from __future__ import annotations

from p2pavg.rounds.protocol.ballot import Ballot, Lineage, PeerId

MOST_AHEAD = 4096  # attempts: no ballot is so far ahead of the last one that a member saw
STANDINGS_KEPT = 64  # (epoch, lineage) pairs of which promises are remembered


class Promises:
    """A member promises upward only, and opens no ballot that anybody can have seen before."""

    def __init__(self, me: PeerId, life: int) -> None:
        self._me = me
        self._life = life
        self._serial = life  # of the ballot that this peer opened last
        # Standing -> the first and the last promise.
        self._kept: dict[tuple[int, Lineage], tuple[Ballot, Ballot]] = {}
        self.last: Ballot | None = None  # the last promise where this peer stands now
        self.released = False  # whether the leader of `last` gave its question up
        self.bound: Ballot | None = None  # the last ballot whose leader was told DONE, and did not give it up
        # Leaders whose links broke since: a new process may have the name of one.
        self.gone: set[PeerId] = set()
        self.floor = -1  # attempts up to this number are taken, as others told

    def add(self, ballot: Ballot) -> None:
        """Promise the ballot: from now on this peer promises no lower one."""
        self.last, self.released = ballot, False
        self.gone.discard(ballot.leader)
        first, _ = self._kept.pop(ballot.standing, (ballot, ballot))
        self._kept[ballot.standing] = first, ballot
        if len(self._kept) > STANDINGS_KEPT:
            del self._kept[next(iter(self._kept))]

    def opened(self, ballot: Ballot) -> bool:
        """Whether this life of the peer opened the ballot. After a clock went back, an earlier life's ballots
        have larger numbers.
        """
        return ballot.leader == self._me and self._life < ballot.serial <= self._serial

    def first(self, standing: tuple[int, Lineage]) -> Ballot:
        """The first ballot of this standing that this process promised; there is one."""
        return self._kept[standing][0]

    def move(self, standing: tuple[int, Lineage]) -> None:
        """This peer stands at another (epoch, lineage), which it may have left earlier."""
        _, self.last = self._kept.get(standing, (None, None))
        self.released, self.bound, self.floor = False, None, -1

    def next(self, standing: tuple[int, Lineage]) -> Ballot:
        """A ballot of this peer that nobody has seen, above the last promise and above all taken attempts."""
        taken = self.last.attempt if self.last is not None else -1
        self._serial += 1
        epoch, lineage = standing
        return Ballot(epoch, max(taken, self.floor) + 1, self._me, self._serial, lineage)

    def highest(self, standing: tuple[int, Lineage]) -> Ballot:
        """The last promise, or a ballot of this peer that nobody holds."""
        epoch, lineage = standing
        return self.last or Ballot(epoch, 0, self._me, self._serial, lineage)

    def raise_floor(self, attempt: int) -> None:
        """Attempts up to `attempt` are taken."""
        self.floor = max(self.floor, attempt)

    def release(self, ballot: Ballot | None = None) -> None:
        """The leader of this promised ballot (None: of the last one) gave its question up."""
        self.released = self.released or ballot in (None, self.last)
        if ballot is not None and ballot == self.bound:
            self.bound = None

    def bind(self, ballot: Ballot | None) -> None:
        """The leader of this ballot was told DONE; None: no leader was told DONE of the ballot that is
        held.
        """
        self.bound = ballot

    def lose(self, leader: PeerId) -> None:
        """The link to this peer broke."""
        self.gone.add(leader)

    def regain(self, leader: PeerId) -> None:
        """Others hear this peer: the process that has the promise still lives."""
        self.gone.discard(leader)

    def hold(self) -> None:
        """A new ballot is held: the leaders of earlier ballots, and what these leaders were told,
        matter no more.
        """
        self.gone.clear()
        self.bound = None


class Rivalry:
    """Which of two leaders gives way when a member is bound to the other one's ballot."""

    def __init__(self, promises: Promises) -> None:
        self._promises = promises
        self._met: Ballot | None = None  # the rival ballot that this peer's ballot met last

    def yields(self, ours: Ballot, other: Ballot) -> bool:
        """Whether this peer's ballot gives way to the rival.

        Of two rivals the lower ballot gives way, and so does a ballot that meets the same rival twice: a
        round that keeps running is not torn apart.
        """
        rivals = other.standing == ours.standing and other.attempt <= ours.attempt + MOST_AHEAD
        if rivals:
            self._promises.raise_floor(other.attempt)
        yields = rivals and (other > ours or other == self._met)
        self._met = other
        return yields
