"""What this peer knows of the other peers: who is alive, where each stands, which camp wins when
lineages meet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from p2pavg.rounds.machine.events import PeerUp
from p2pavg.rounds.machine.rules.pace import UNKNOWN, Pace
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.messages import Progress, Ready
from p2pavg.rounds.protocol.roles import LinkFacts, Role, Seat

# One for all, as most peers have told nothing of the kind, and there may be hundreds.
_NO_LINKS: Mapping[PeerId, LinkFacts] = {}
_NOBODY: Mapping[PeerId, float] = {}


@dataclass(slots=True, eq=False)
class Facts:
    """One peer with a link to this one, as that peer last told."""

    peer: PeerId
    epoch: int
    lineage: Lineage
    role: Role
    client_only: bool
    total: int
    leader: PeerId | None
    upload_bps: float
    download_bps: float = 0.0
    # Links to other peers, as the peer measured them.
    links: Mapping[PeerId, LinkFacts] = field(default_factory=lambda: _NO_LINKS)
    region: str = ""
    heard: bool = False  # the peer told over this link where it stands
    samples: int = 0
    pace: Pace = UNKNOWN
    rate: float = 0.0  # samples per second
    told: int | None = None  # the samples of the peer's others, as the peer was last told
    told_at: float = 0.0
    boundary: bool = False
    pending: bool = False
    late: bool = False  # the peer's last commit found its training thread away from the boundary
    joining: bool = False
    camp: int = 1  # how many trainers stand there, as the peer knows
    # Trainers to which the peer gets no link, and since when.
    apart: Mapping[PeerId, float] = field(default_factory=lambda: _NOBODY)
    met: Collection[PeerId] = ()  # peers that nobody can dial, and to which the peer has a link all the same
    linked_at: float = 0.0
    relayed: bool = False  # a third member carries this peer's link to the peer
    silent: bool = False  # the link is up, but nothing is heard over it
    committed_at: float = 0.0  # when the peer's pending commit was

    def stands_at(self, epoch: int, lineage: Lineage) -> bool:
        return self.epoch == epoch and self.lineage == lineage

    def trains_at(self, epoch: int, lineage: Lineage) -> bool:
        """Whether the peer is a live trainer that stands at (epoch, lineage)."""
        return (
            self.epoch == epoch
            and self.lineage == lineage
            and not self.silent
            and not self.joining
            and self.role is Role.TRAINER
        )


@dataclass(frozen=True, slots=True)
class Camp:
    """All live trainers at one (epoch, lineage)."""

    epoch: int
    lineage: Lineage
    peers: int
    total: int

    def beats(self, other: Camp) -> bool:
        """The higher epoch wins, then more live peers, then more samples, then the smaller id."""
        if (self.epoch, self.peers, self.total) != (other.epoch, other.peers, other.total):
            return (self.epoch, self.peers, self.total) > (other.epoch, other.peers, other.total)
        return self.lineage < other.lineage


class LinkedPeers:
    """All peers that have a link to this one. Live trainers are kept by where they stand, so that a look at
    one camp, or for another camp, is no look at all peers. Where a peer stands changes only in this class.
    """

    def __init__(self) -> None:
        self._facts: dict[PeerId, Facts] = {}
        self._camps: dict[tuple[int, Lineage], dict[PeerId, Facts]] = {}  # live trainers
        self.version = 0  # counts changes of the camps
        self.claims: dict[PeerId, Facts] = {}  # peers that say that they get no link to another peer
        self.doubted: frozenset[PeerId] = frozenset()  # peers that say that they are ahead, and gave nothing
        self.relayed: set[PeerId] = set()  # peers to which a third member carries this peer's link
        # Peers that said that they leave, and are heard: they go on giving what others download from them.
        self.departed: set[PeerId] = set()

    def __iter__(self) -> Iterator[Facts]:
        return iter(self._facts.values())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._facts

    def get(self, peer: PeerId) -> Facts | None:
        return self._facts.get(peer)

    def alive(self, peer: PeerId) -> bool:
        facts = self._facts.get(peer)
        return facts is not None and not facts.silent

    def gives(self, peer: PeerId) -> bool:
        """Whether what is downloaded from the peer may still come."""
        return peer in self.departed or self.alive(peer)

    def company(self) -> int:
        """How many live trainers have told where they stand, wherever that is. Any thread may ask."""
        return sum(
            facts.heard and facts.trains_at(facts.epoch, facts.lineage)
            for facts in list(self._facts.values())
        )

    def _enter(self, facts: Facts) -> None:
        if facts.role is Role.TRAINER and not facts.silent and not facts.joining:
            where = facts.epoch, facts.lineage
            camp = self._camps.get(where)
            if camp is None:
                camp = self._camps[where] = {}
            camp[facts.peer] = facts
            self.version += 1

    def _leave(self, facts: Facts) -> None:
        where = facts.epoch, facts.lineage
        camp = self._camps.get(where)
        if camp is not None and camp.pop(facts.peer, None) is not None:
            self.version += 1
            if not camp:
                del self._camps[where]

    def stands(self, facts: Facts, epoch: int, lineage: Lineage, *, joining: bool) -> None:
        """This peer knows now where the peer stands."""
        self._leave(facts)
        facts.epoch, facts.lineage, facts.joining = epoch, lineage, joining
        self._enter(facts)

    def hears(self, facts: Facts, silent: bool) -> None:
        """The peer fell silent, or is heard again."""
        self._leave(facts)
        facts.silent = silent
        self._enter(facts)

    def up(self, event: PeerUp, now: float = 0.0) -> None:
        peer = event.peer
        self.down(peer)
        facts = self._facts[peer] = Facts(
            peer,
            event.epoch,
            event.lineage,
            event.role,
            event.client_only,
            event.total_samples,
            event.leader,
            event.upload_bps,
            relayed=event.relayed,
            region=event.region,
            linked_at=now,
        )
        if event.relayed:
            self.relayed.add(peer)
        self._enter(facts)

    def down(self, peer: PeerId) -> None:
        facts = self._facts.pop(peer, None)
        self.claims.pop(peer, None)
        self.relayed.discard(peer)
        self.departed.discard(peer)
        if facts is not None:
            self._leave(facts)

    def told(self, peer: PeerId, message: Progress, now: float) -> Facts | None:
        """The peer told where the peer stands."""
        facts = self._facts.get(peer)
        if facts is None:
            return None
        moved = message.epoch != facts.epoch or facts.pending != message.pending
        if moved or message.samples > facts.samples:
            facts.pace = Pace(message.step_s, message.step_samples, now)
        if moved:
            facts.told = None
        role = facts.role
        if role is not Role.WATCHER:
            role = Role.JOINER if message.joining else Role.TRAINER
        stood = facts.epoch, facts.lineage, facts.joining, facts.role
        if stood != (message.epoch, message.lineage, message.joining, role):
            self._leave(facts)
            facts.role = role
            self.stands(facts, message.epoch, message.lineage, joining=message.joining)
        facts.heard = True
        facts.samples, facts.rate, facts.boundary = message.samples, message.rate, message.boundary
        facts.pending, facts.leader, facts.total = message.pending, message.leader, message.total
        facts.camp, facts.met = message.camp, message.met
        self._claims(facts, message.apart, now)
        facts.upload_bps, facts.download_bps = message.up_bps, message.down_bps
        if not message.pending:
            facts.late = False
        return facts

    def ready(self, facts: Facts, message: Ready, now: float) -> None:
        """The peer told that it waits at a boundary."""
        if message.samples > facts.samples:
            facts.pace = Pace(message.step_s, message.step_samples, now)
        facts.samples, facts.boundary = message.samples, True

    def _claims(self, facts: Facts, apart: Collection[PeerId], now: float) -> None:
        if facts.apart.keys() == set(apart):
            return
        facts.apart = {peer: facts.apart.get(peer, now) for peer in apart}
        self.claims.pop(facts.peer, None)
        if apart:
            self.claims[facts.peer] = facts

    def trains(self, facts: Facts, epoch: int, lineage: Lineage) -> None:
        """The peer leads or votes at (epoch, lineage), thus trains there. Its hello may have said otherwise,
        as a hello is older than its link; what the peer told over the link counts more.
        """
        if not facts.heard and not facts.trains_at(epoch, lineage):
            self._leave(facts)
            facts.role = Role.TRAINER
            self.stands(facts, epoch, lineage, joining=False)

    def committed(
        self,
        seats: Iterable[tuple[Seat, float]],
        before: tuple[int, Lineage],
        after: tuple[int, Lineage],
        total: int,
        now: float,
    ) -> None:
        """These members, each with its weight in the average, go from `before` to `after`. total: samples of
        the lineage then.
        """
        (epoch, lineage), known = after, self._facts.get
        left, arrived = self._camps.get(before, {}), self._camps.get(after)
        for seat, weight in seats:
            facts = known(seat.peer)
            if facts is None or facts.epoch > epoch:
                continue
            if not seat.voter:
                if facts.stands_at(*before):
                    # The peer gets the result without a vote.
                    self.stands(facts, epoch, lineage, joining=facts.joining)
                continue
            if facts.epoch != epoch or facts.lineage != lineage:
                if left.pop(facts.peer, None) is not None:  # most do: as `stands` does, but for all at once
                    facts.epoch, facts.lineage = epoch, lineage
                    if arrived is None:
                        arrived = self._camps.setdefault(after, {})
                    arrived[facts.peer] = facts
                else:
                    self.trains(facts, *before)
                    self.stands(facts, epoch, lineage, joining=facts.joining)
                facts.samples, facts.boundary, facts.pending, facts.total = 0, False, True, total
            facts.committed_at = now
            facts.late = weight == 0
        self.version += 1
        if not self._camps.get(before, True):
            del self._camps[before]

    def trainers(self) -> Iterator[Facts]:
        """Peers that live and have the state of some (epoch, lineage)."""
        return (f for f in self._facts.values() if not f.silent and f.role is Role.TRAINER and not f.joining)

    def standing(self, epoch: int, lineage: Lineage) -> Collection[Facts]:
        """The live trainers at (epoch, lineage)."""
        return self._camps.get((epoch, lineage), {}).values()

    def rivals(self, epoch: int, lineage: Lineage) -> bool:
        """Whether any live trainer is ahead of (epoch, lineage), or at the same epoch of another lineage."""
        for (at, other), camp in self._camps.items():
            ahead = at > epoch or (at == epoch and other != lineage)
            if ahead and not self.doubted.issuperset(camp):
                return True
        return False

    def doubt(self, peers: Collection[PeerId]) -> None:
        """The word of these peers alone about where they stand counts for nothing."""
        if self.doubted != frozenset(peers):
            self.doubted = frozenset(peers)
            self.version += 1

    def camps(self, mine: Camp) -> list[Camp]:
        """This peer's camp first, then the other camps. `mine` counts this peer alone."""
        found = [mine]
        for where, camp in self._camps.items():
            # A peer that follows another leader tells this one only now and then where it stands: its leader
            # knows better.
            told, total = max(f.camp for f in camp.values()), max(f.total for f in camp.values())
            if where == (mine.epoch, mine.lineage):
                found[0] = Camp(*where, max(mine.peers + len(camp), told), max(mine.total, total))
            elif not self.doubted.issuperset(camp):
                found.append(Camp(*where, max(len(camp), told), total))
        return found


# Gaps: pairs of peers that get no link to each other though both live and train: a blocked route, or IPv4
# alone here and IPv6 alone there. Neither of the two owns a part then, so that a round needs no link between
# them, and a peer that reaches both leads.

Gap = tuple[PeerId, PeerId]
# Seconds for which one side's word of a gap is enough; then the other side has to say the same.
BELIEVED_S = 5.0


def gaps(linked: LinkedPeers, me: PeerId, own: Collection[PeerId], now: float) -> list[Gap]:
    """The pairs that this peer believes in. own: the peers to which this peer itself gets no link."""
    found = [(me, peer) for peer in own]
    for claimant in linked.claims.values():
        for peer, since in claimant.apart.items():
            other = linked.get(peer)
            if other is not None and (now - since < BELIEVED_S or claimant.peer in other.apart):
                found.append((claimant.peer, peer))
            elif other is None and peer != me:
                found.append((claimant.peer, peer))  # this peer has no link to that peer either
    return found


def ends(pairs: Collection[Gap], among: Collection[PeerId] | None = None) -> set[PeerId]:
    """All peers at one end of a pair; among: of the pairs alone whose both ends are among these."""
    return {
        peer for pair in pairs if among is None or (pair[0] in among and pair[1] in among) for peer in pair
    }
