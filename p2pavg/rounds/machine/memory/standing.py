"""Where this peer stands in the run, and what this peer knows of the epoch under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.roles import Role


@dataclass(slots=True)
class Standing:
    """The last commit of this peer, and how far the training thread is behind that commit."""

    epoch: int  # the epoch after the last commit
    lineage: Lineage  # after the last commit
    role: Role  # a JOINER becomes a TRAINER when a state is loaded
    applied_epoch: int  # where the training thread stands
    pending: bool = False  # the training thread has yet to apply the last commit
    joining: tuple[int, Lineage] | None = None  # where a download leads, and later how far the download is
    departing: bool = False  # this peer takes part in no new round
    began_at: float = 0.0  # when this peer came to `epoch`

    @property
    def standing(self) -> tuple[int, Lineage]:
        """The (epoch, lineage) that the next average here belongs to."""
        return self.joining or (self.epoch, self.lineage)

    def move(self, epoch: int, lineage: Lineage, now: float) -> None:
        """A commit, or a loaded state, brings this peer to another epoch."""
        self.epoch, self.lineage, self.began_at = epoch, lineage, now

    def commit(self) -> None:
        """An average is decided, and waits for the training thread."""
        self.pending = True

    def applied(self, epoch: int) -> bool:
        """The training thread stands at `epoch` now. Returns whether no further average is to be applied."""
        self.applied_epoch = epoch
        last = self.pending and epoch == self.epoch
        if last:
            self.pending = False
        return last

    def load(self) -> None:
        """The training thread has loaded a state: no earlier average is to be applied any more."""
        self.pending = False
        self.role = Role.TRAINER

    def reach(self, epoch: int, lineage: Lineage) -> None:
        """The training thread has come so far, by a state or by a result on top of a state."""
        self.applied_epoch = epoch
        if self.joining is not None:
            self.joining = (epoch, lineage)

    def join(self, epoch: int, lineage: Lineage) -> None:
        """This peer becomes a member of no round before it has the state of (epoch, lineage)."""
        self.joining = (epoch, lineage)

    def end_joining(self) -> None:
        """The state is here, or the download is given up."""
        self.joining = None

    def leave(self) -> None:
        """This peer will leave the run."""
        self.departing = True


@dataclass(slots=True)
class EpochState:
    """What is true of one epoch alone. Each epoch gets a new object, so that no field outlives the epoch."""

    # Samples that the others will have when this peer's share is there, by their last shares.
    expected: int = 0
    begun_before: bool = False  # whether a round of this epoch began once: the next round needs no target
    attempts: int = 0  # ballots that this peer held
    proposed_at: float = 0.0  # when the first of these ballots came
    excluded: dict[PeerId, Cause] = field(default_factory=dict)  # peers that failed an attempt, and why
    # Excluded peer -> the leader by whose word alone it is excluded.
    accused: dict[PeerId, PeerId] = field(default_factory=dict)
    suspects: set[PeerId] = field(default_factory=set)  # peers that should lead, and say nothing
    gave_way: set[PeerId] = field(
        default_factory=set
    )  # leaders that follow another one, they did not say whom

    def held(self, now: float) -> None:
        """This peer holds one more ballot of the epoch."""
        if self.attempts == 0:
            self.proposed_at = now
        self.attempts += 1

    def begin(self, begun: bool = True) -> None:
        """A round of this epoch has begun, here or as another peer says."""
        self.begun_before = self.begun_before or begun

    def end_begun(self) -> None:
        """No peer has anything to average: the target counts again."""
        self.begun_before = False

    def expect(self, samples: int) -> None:
        """So many samples are expected of the other peers; 0: the leader says how many there are."""
        self.expected = samples
