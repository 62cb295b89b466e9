"""Actions that come out of the rounds machine, to be carried out in order: plain frozen data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from p2pavg.plan import Plan
from p2pavg.rounds.machine.rules.spacing import Spacing
from p2pavg.rounds.protocol.ballot import Ballot, Lineage, Note, PeerId
from p2pavg.rounds.protocol.causes import Loss
from p2pavg.rounds.protocol.messages import CatchUp, Message
from p2pavg.rounds.protocol.roles import Seat


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message; a message to a peer whose link is gone is dropped (PeerDown tells)."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Prepare everything for this transfer: engine job, buffers. Frames wait until BeginJob."""

    transfer: int
    ballot: Ballot
    members: tuple[Seat, ...]  # rank order, this peer included
    plan: Plan


@dataclass(frozen=True, slots=True)
class BeginJob:
    """Let gradients flow. Own weight > 0: the training thread waits at its boundary until the outcome."""

    transfer: int
    weights: tuple[float, ...]  # per rank


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Forget the job and its result; gradients stay as they are."""

    transfer: int
    why: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of `transfer` is the epoch's average. Applied is the answer.

    Several Commits may queue up while the training thread computes or a state is downloaded. A Commit is void
    when its turn comes and the training thread does not stand at `before`, and when it follows on a state
    that another StartHeal replaces before the state is loaded.

    late: own samples are not in the average (weight 0): decode the result into another buffer, keep the own
    one. Finish the job (`Engine.finish`); results on their way to joiners go on first.
    """

    transfer: int
    ballot: Ballot
    members: tuple[Seat, ...]
    weights: tuple[float, ...]
    samples: tuple[int, ...]  # per rank; 0 where the weight is 0
    digests: tuple[bytes, ...]
    before: Lineage  # the lineage of the state to which the result is applied
    lineage: Lineage  # the lineage after this average
    late: bool
    following: bool  # the result follows on a state that is being downloaded
    attempts: int
    failed: tuple[tuple[PeerId, str], ...]  # peers that were left out in this epoch, and why
    note: Note  # all members step by this note
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
    """Fetch the state of one of the donors, best first, and all results since.

    The answers are Healed, Followed for each result, and Level; or HealFailed. A second StartHeal replaces
    the first.
    """

    epoch: int
    lineage: Lineage
    donors: tuple[PeerId, ...]
    why: str
    results_do: bool = False  # no own sample is undecided: results that follow on the own state are enough


@dataclass(frozen=True, slots=True)
class StopHeal:
    """Give up the download under way. Whatever the training thread has loaded stays."""

    why: str


@dataclass(frozen=True, slots=True)
class WaitAt:
    """The others are known to have `others` samples: stop at the own step that reaches the rest.

    None: do not stop (this epoch's round goes on without this peer, or this peer heals).
    """

    others_samples: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Arrive at the next boundary: a round is forming."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Let a training thread that waits in step() go on computing (KeepGoing); a pending Stop is off."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The next round waits for a newcomer. For logs, once for each newcomer."""

    peer: PeerId
    asked: CatchUp


@dataclass(frozen=True, slots=True)
class Stretch:
    """An epoch lasts longer than its samples need, for what rounds may cost. For logs, once in a row."""

    spacing: Spacing


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Every peer that had the run's state is gone, and this peer has none: it waits until one is back."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer failed an attempt of this epoch. For logs and reports."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Discarded:
    """Samples that this peer counted are in no average of the surviving lineage: name them in a report.

    Negative: so many of the samples that were named before are in the surviving lineage after all.
    """

    samples: int
    why: Loss


@dataclass(frozen=True, slots=True)
class HandOver:
    """Carry the contribution of the waiting training thread to one of the receivers, best first.
    HandedOver follows.
    """

    receivers: tuple[PeerId, ...]
    samples: int
    # (transfer, how many of the samples it had), undecided as far as this peer knows.
    offered: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Left:
    """This peer is done: close the links."""


LEFT = "left the run"  # why the link to a peer is gone that said so


class TraceKind(StrEnum):
    """The turn of an epoch that a `Trace` tells of."""

    ABDICATED = "abdicated"  # this peer is late with its own step, and lets another one lead
    ABORTED = "aborted"  # a ballot is void
    APART = "apart"  # this peer gets no link to some trainers
    APPLIED = "applied"  # the training thread has applied the last average
    BEGUN = "begun"  # gradients may flow
    HANDED_OVER = "handed over"  # a receiver counts the samples of this peer
    COMMITTED = "committed"  # the result is the epoch's average
    COUNTED = "counted"  # samples of a departing peer are in an average already
    DONE = "done"  # the whole result is here
    DOWN = "down"  # the link to a peer is gone
    EXCLUDED = "excluded"  # a peer stays out of this epoch
    HEAL = "heal"  # this peer goes where another camp stands
    HEALED = "healed"  # a state is loaded
    HEAL_FAILED = "heal failed"  # no donor could give the state
    HEARD_AGAIN = "heard again"  # a silent peer is heard
    HELD = "held"  # the next round waits for a newcomer
    INQUEST = "inquest"  # this peer asks what became of a ballot
    INQUEST_ABORTS = "inquest aborts"  # the ballot that this peer asked about is void
    INQUEST_COMMITS = "inquest commits"  # the ballot that this peer asked about is committed
    LEADER = "leader"  # this peer follows another leader
    LEVEL = "level"  # state and results are in
    MOVED = "moved"  # this machine has another address
    ORPHANED = "orphaned"  # this peer has no state, and sees nobody that has one
    PAUSED = "paused"  # this process was stopped
    PROPOSED = "proposed"  # this peer holds a new ballot
    REACHED = "reached"  # the target is reached
    READMITTED = "readmitted"  # a peer that failed is asked again
    REFUSED = "refused"  # this peer does not accept a ballot
    SILENT = "silent"  # nothing is heard of a peer
    STRETCHED = "stretched"  # the epoch lasted longer than its samples needed, for what rounds may cost
    SUCCESSOR = "successor"  # another peer is to decide the ballot
    SUSPECTED = "suspected"  # a leader says nothing, or gets nothing done


@dataclass(frozen=True, slots=True)
class Trace:
    """A turn of the epoch, for logs and measurements."""

    kind: TraceKind
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = (
    Send
    | OpenJob
    | BeginJob
    | CancelJob
    | Commit
    | RoundFailed
    | StartHeal
    | StopHeal
    | WaitAt
    | Stop
    | Resume
    | Hold
    | Stretch
    | Orphaned
    | Blame
    | Discarded
    | HandOver
    | Left
    | Trace
)
