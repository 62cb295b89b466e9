"""What this peer knows of the others: who is alive, where each stands, which camp wins when lineages meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from p2pavg.rounds.ballot import Lineage, PeerId
from p2pavg.rounds.events import PeerUp
from p2pavg.rounds.messages import Progress
from p2pavg.rounds.pace import Pace
from p2pavg.rounds.words import Role


@dataclass(slots=True)
class Facts:
    """One peer with a link to us, as it last told."""

    peer: PeerId
    epoch: int
    lineage: Lineage
    role: Role
    client_only: bool
    total: int
    leader: PeerId | None
    upload_bps: float
    download_bps: float = 0.0
    link_bps: Mapping[PeerId, float] = field(default_factory=dict)  # from others, where it told
    samples: int = 0
    pace: Pace = field(default_factory=Pace)
    rate: float = 0.0  # samples per second
    told: int | None = None  # what we last told it of the others' samples
    told_at: float = 0.0
    boundary: bool = False
    pending: bool = False
    late: bool = False  # its last commit found it away from its boundary
    joining: bool = False
    camp: int = 1  # how many stand there, as this peer knows
    silent: bool = False  # the link is there, but nothing is heard
    committed_at: float = 0.0  # when its pending commit was

    def stands_at(self, epoch: int, lineage: Lineage) -> bool:
        return self.epoch == epoch and self.lineage == lineage

    def trains_at(self, epoch: int, lineage: Lineage) -> bool:
        """Whether it is a live trainer that stands there."""
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


class View:
    """All peers that have a link to this one."""

    def __init__(self) -> None:
        self._facts: dict[PeerId, Facts] = {}

    def __iter__(self) -> Iterator[Facts]:
        return iter(self._facts.values())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._facts

    def get(self, peer: PeerId) -> Facts | None:
        return self._facts.get(peer)

    def alive(self, peer: PeerId) -> bool:
        facts = self._facts.get(peer)
        return facts is not None and not facts.silent

    def up(self, event: PeerUp) -> None:
        self._facts[event.peer] = Facts(
            event.peer,
            event.epoch,
            event.lineage,
            event.role,
            event.client_only,
            event.total_samples,
            event.leader,
            event.upload_bps,
        )

    def down(self, peer: PeerId) -> None:
        self._facts.pop(peer, None)

    def told(self, peer: PeerId, message: Progress, now: float) -> Facts | None:
        """The peer told where it stands."""
        facts = self._facts.get(peer)
        if facts is None:
            return None
        moved = message.epoch != facts.epoch or facts.pending != message.pending
        if moved or message.samples > facts.samples:
            facts.pace = Pace(message.step_s, message.step_samples, now)
        if moved:
            facts.told = None
        facts.epoch, facts.lineage, facts.total = message.epoch, message.lineage, message.total
        facts.samples, facts.rate, facts.boundary = message.samples, message.rate, message.boundary
        facts.pending, facts.joining, facts.leader = message.pending, message.joining, message.leader
        facts.camp = message.camp
        facts.upload_bps, facts.download_bps = message.up_bps, message.down_bps
        if not message.pending:
            facts.late = False
        if facts.role is not Role.WATCHER:
            facts.role = Role.JOINER if message.joining else Role.TRAINER
        return facts

    def trainers(self) -> Iterator[Facts]:
        """Those that live and have the state of some (epoch, lineage)."""
        return (f for f in self._facts.values() if not f.silent and f.role is Role.TRAINER and not f.joining)

    def standing(self, epoch: int, lineage: Lineage) -> list[Facts]:
        """The live trainers at (epoch, lineage)."""
        return [f for f in self._facts.values() if f.trains_at(epoch, lineage)]

    def rivals(self, epoch: int, lineage: Lineage) -> bool:
        """Whether any live trainer is ahead of (epoch, lineage), or at the same epoch of another lineage."""
        for f in self._facts.values():
            if f.epoch < epoch or f.silent or f.joining or f.role is not Role.TRAINER:
                continue
            if f.epoch > epoch or f.lineage != lineage:
                return True
        return False

    def camps(self, mine: Camp) -> list[Camp]:
        """The other camps, and ours first; `mine` counts this peer alone."""
        found: dict[tuple[int, Lineage], tuple[int, int, int]] = {
            (mine.epoch, mine.lineage): (mine.peers, 0, mine.total)
        }
        for facts in self.trainers():
            seen, told, total = found.get((facts.epoch, facts.lineage), (0, 0, 0))
            found[facts.epoch, facts.lineage] = (seen + 1, max(told, facts.camp), max(total, facts.total))
        # Whoever follows another leader tells us where it stands only now and then: its leader knows better.
        return [Camp(*where, max(seen, told), total) for where, (seen, told, total) in found.items()]
