"""What goes into the rounds machine and what comes out: plain frozen data, no I/O.

Peers are 20-byte ids, lineages 32-byte digests, times seconds of a monotonic clock, rates samples or bit per
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from p2pavg.rounds.ballot import Ballot, Lineage, PeerId
from p2pavg.rounds.messages import Message
from p2pavg.transport.engine import Part


class Role(StrEnum):
    """What a peer is in the run."""

    TRAINER = "trainer"  # has the state of its (epoch, lineage), contributes
    JOINER = "joiner"  # waits for its state, never votes; receives results
    WATCHER = "watcher"  # looks on; never a member


@dataclass(frozen=True, slots=True)
class Generation:
    """One applied epoch in a peer's history: the lineage after it, and which transfer made it."""

    epoch: int  # the epoch that this average ended; the peer then stood at epoch + 1
    lineage: Lineage  # after it
    transfer: int
    samples: int  # of all members
    total: int  # samples of the whole lineage so far
    leader: PeerId  # who led it, and goes on leading


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a group, in rank order."""

    peer: PeerId
    voter: bool  # False: a joiner; owns nothing, is not waited for


@dataclass(frozen=True, slots=True)
class PlanMember:
    """What the plan of the parts may depend on."""

    peer: PeerId
    voter: bool
    upload_bps: float  # 0.0: unknown
    download_bps: float
    owns: bool = True  # False: others have no link to it


# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """Where the training thread is. Fed when it arrives at a boundary, and with every Tick while it computes.

    samples: counted since the last average that included them; only grows until Commit, Healed or Discard.
    weight: what this peer's mean counts in the average; None: its samples.
    at_boundary: it waits in step() with a fixed contribution (samples may be 0: nothing to contribute) and
    was given no outcome yet: False as soon as Resume, Commit, RoundFailed or a state was handed to it.
    step_seconds, step_samples: how long the last step took and what it counted; 0 before the first.
    """

    samples: int
    samples_per_second: float
    at_boundary: bool
    weight: float | None = None
    step_seconds: float = 0.0
    step_samples: int = 0
    upload_bps: float = 0.0  # as measured; 0.0: not yet
    download_bps: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A control link to a peer is ready; the facts are those of its hello. Data streams follow."""

    peer: PeerId
    epoch: int
    lineage: Lineage
    role: Role = Role.TRAINER
    client_only: bool = False
    total_samples: int = 0  # of its lineage
    leader: PeerId | None = None  # whom it follows
    upload_bps: float = 0.0  # 0.0: unknown
    rtt_s: float = 0.0  # 0.0: unknown


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The link to a peer is gone (closed, reset, or given up), or it left."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A control message, already parsed."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class PeerHealth:
    """One link's heartbeats, as seconds of age now."""

    peer: PeerId
    heard_s: float  # since anything was heard
    loop_s: float  # since its event loop was last known to turn
    trainer_s: float  # since its training thread last called step()
    rtt_s: float = 0.0  # 0.0: unknown


@dataclass(frozen=True, slots=True)
class Health:
    """Fed periodically (every `Machine.health_interval` seconds) for all links."""

    peers: tuple[PeerHealth, ...]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far the exchange with one member is. Counts of chunks and link bytes; monotone."""

    contributions: int  # chunks of our parts that this rank contributed
    results: int  # result chunks of its parts that it returned
    contributions_expected: int
    results_expected: int
    bytes_received: int = 0  # gradient bytes of its data streams, unfinished chunks included


@dataclass(frozen=True, slots=True)
class JobProgressed:
    """Fed periodically while a job runs."""

    transfer: int
    ranks: tuple[RankProgress, ...]  # by rank; our own entry is ignored
    first_byte_at: float = 0.0  # 0.0: no gradient byte yet


@dataclass(frozen=True, slots=True)
class JobDone:
    """The whole result is in."""

    transfer: int
    digests: tuple[bytes, ...]  # one of 32 bytes per part


@dataclass(frozen=True, slots=True)
class JobRefused:
    """A member contributed something that cannot be used (non-finite, wrong size)."""

    transfer: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job could not be opened or run here (no memory, no link to a rank)."""

    transfer: int
    why: str
    rank: int | None = None  # whom it is about


@dataclass(frozen=True, slots=True)
class Applied:
    """The training thread has applied the last Commit and stands at `epoch` (= committed + 1)."""

    epoch: int
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class Healed:
    """The training thread loaded a downloaded state; what it had accumulated is gone from its buffer."""

    epoch: int
    lineage: Lineage
    history: tuple[Generation, ...] = ()  # the donor's (Machine.history), newest last
    dropped: int = 0  # samples that the training thread had accumulated when it loaded the state


@dataclass(frozen=True, slots=True)
class HealFailed:
    """No donor could give the state; the machine names others, later."""

    why: str


@dataclass(frozen=True, slots=True)
class Discard:
    """The training thread dropped what it had accumulated (and reports it itself)."""

    why: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run: at once between rounds, after the outcome inside one. Ends with the action Left.

    notice_s: how long all of it may take. hand_over: the training thread waits at a boundary for good, and
    its samples may go to another peer (Bequeath).
    """

    notice_s: float = 5.0
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class Bequeathed:
    """Answers Bequeath.

    taken: an heir counts the samples as its own from now on. behind: they were too old for those who stay.
    """

    taken: bool
    behind: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `Machine.next_deadline` is reached, or just a beat."""


Event = (
    LocalProgress
    | PeerUp
    | PeerDown
    | Received
    | Health
    | JobProgressed
    | JobDone
    | JobRefused
    | JobFailed
    | Applied
    | Healed
    | HealFailed
    | Discard
    | Leave
    | Bequeathed
    | Tick
)

# --------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message; when the link is gone it is dropped (PeerDown tells)."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Prepare everything for this transfer: engine job, buffers. Frames wait until BeginJob."""

    transfer: int
    ballot: Ballot
    members: tuple[Seat, ...]  # rank order, this peer included
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BeginJob:
    """Gradients may flow. Own weight > 0: the training thread waits at its boundary until the outcome."""

    transfer: int
    weights: tuple[float, ...]  # per rank


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Forget the job and its result; gradients stay as they are."""

    transfer: int
    why: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of `transfer` is the epoch's average. Applied answers.

    Several may queue up while the training thread computes or a state is downloaded. One whose `before` is
    not where the training thread stands when its turn comes is void; so is one that follows on a state which
    another StartHeal replaces before it is loaded.

    late: own samples are not in it (weight 0): decode into another buffer, keep the own one. The job is to
    be finished (`Engine.finish`), results on their way to joiners go on first.
    """

    transfer: int
    ballot: Ballot
    members: tuple[Seat, ...]
    weights: tuple[float, ...]
    samples: tuple[int, ...]  # per rank; 0 where the weight is 0
    digests: tuple[bytes, ...]
    before: Lineage  # of the state that it is to be applied to
    lineage: Lineage  # after it
    late: bool
    following: bool  # it follows on a state that is being downloaded
    attempts: int
    failed: tuple[tuple[PeerId, str], ...]  # who was left out in this epoch, and why
    seconds: Mapping[str, float] = field(default_factory=dict)
    # phases as seen here, one after the other: waiting (boundary -> proposal), matchmaking (-> begin),
    # transfer (-> own result whole), commit (-> now)


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """All attempts failed; gradients and samples are kept, the training thread goes on (or raises)."""

    epoch: int
    why: str
    blamed: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class StartHeal:
    """Download the state of (epoch, lineage) or later from one of the donors, best first.

    Healed or HealFailed follows. A second StartHeal replaces the first: the swarm moved on.
    """

    epoch: int
    lineage: Lineage
    donors: tuple[PeerId, ...]
    why: str


@dataclass(frozen=True, slots=True)
class WaitAt:
    """The others are known to have this many samples: stop at the own step that reaches the rest.

    None: do not stop (this epoch's round goes on without us, or we are healing).
    """

    others_samples: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Arrive at the next boundary: a round is forming."""


@dataclass(frozen=True, slots=True)
class Resume:
    """If the training thread waits in step(), let it go on computing (KeepGoing); a pending Stop is off."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer failed an attempt of this epoch; for logs and reports."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Discarded:
    """Samples that this peer counted are in no average of the surviving lineage: name them in a report.

    Negative: so many of those that were named before are in it after all, as their lineage won.
    """

    samples: int
    why: str


@dataclass(frozen=True, slots=True)
class Bequeath:
    """Carry what the training thread waits with to one of the heirs, best first. Bequeathed follows."""

    heirs: tuple[PeerId, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class Left:
    """Nothing more to do here: close the links."""


@dataclass(frozen=True, slots=True)
class Trace:
    """For logs and measurement: reached, proposed, begun, done, committed, aborted, suspected, ..."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = (
    Send
    | OpenJob
    | BeginJob
    | CancelJob
    | Commit
    | RoundFailed
    | StartHeal
    | WaitAt
    | Stop
    | Resume
    | Blame
    | Discarded
    | Bequeath
    | Left
    | Trace
)
