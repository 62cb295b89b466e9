"""The control messages of the rounds. How they travel: see `wire`."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.plan import Plan
from p2pavg.rounds.protocol.ballot import Ballot, Held, Lineage, Note, PeerId
from p2pavg.rounds.protocol.causes import Cause, Objection


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a peer stands. To the leader often, to everybody when (epoch, lineage, state) changes."""

    epoch: (
        int  # the one after its last commit: it accumulates for it, or will once it has applied the average
    )
    lineage: Lineage
    samples: int
    rate: float  # samples per second
    boundary: bool  # the training thread waits at a step() boundary
    pending: bool  # the last committed average is not applied yet
    joining: bool  # the sender downloads the state of (epoch, lineage)
    total: int  # samples of its whole lineage
    camp: int  # how many live trainers stand where it stands, itself included
    step_s: float  # seconds of the last step
    step_samples: int  # samples that the last step counted
    leader: PeerId | None  # whom the sender follows
    up_bps: float  # bit/s that the sender can send, and below receive; 0: not measured yet
    down_bps: float
    apart: tuple[PeerId, ...]  # trainers that live, and to which it gets no link, or one that a third carries
    met: tuple[PeerId, ...]  # those that nobody can dial, nor it, and to which it has a link all the same


@dataclass(frozen=True, slots=True)
class Totals:
    """From the leader: what all others together have reported for this epoch."""

    epoch: int
    lineage: Lineage
    others: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Answer to a Progress that came to somebody who does not lead: whom it follows."""

    epoch: int
    lineage: Lineage
    leader: PeerId


@dataclass(frozen=True, slots=True)
class Prepare:
    """A leader proposes a group: promise this ballot, arrive at your next boundary."""

    ballot: Ballot
    members: tuple[PeerId, ...]  # rank order
    voters: tuple[bool, ...]
    plan: Plan  # parts of (owner rank, start, count, deputy ranks), and the group of each member


@dataclass(frozen=True, slots=True)
class Query:
    """A successor asks for the last ballot held, and forbids any later step in a lower one."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to Prepare and Query: accepted; this is the last ballot of the epoch that I held before."""

    ballot: Ballot
    held: Held | None
    since: Ballot  # the first of this (epoch, lineage) that the sender promised since its process began


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer to Prepare and Query: not accepted, and why; where the sender stands."""

    ballot: Ballot
    epoch: int
    lineage: Lineage
    objection: Objection
    promised: Ballot | None  # a higher or still living ballot
    missing: tuple[PeerId, ...]  # members that the sender has no link to


@dataclass(frozen=True, slots=True)
class Ready:
    """The training thread waits at its boundary with this contribution, which holds for that wait."""

    ballot: Ballot
    wait: int  # the number of the wait, from 1 on
    samples: int
    weight: float
    note: Note


@dataclass(frozen=True, slots=True)
class Unready:
    """That wait is over: the contribution declared for it does not hold any more."""

    ballot: Ballot
    wait: int


@dataclass(frozen=True, slots=True)
class Begin:
    """All have promised: gradients may flow, with these weights."""

    ballot: Ballot
    weights: tuple[float, ...]
    samples: tuple[int, ...]
    waits: tuple[int, ...]  # whose declaration is counted; 0: it computes on, and its samples count later
    note: Note  # the leader's, if it is ready, else that of the first who is; all step by it


@dataclass(frozen=True, slots=True)
class Begun:
    """The sender began this round; members compare what the leader told them, and how they fare under it."""

    ballot: Ballot
    digest: bytes  # of BEGIN
    kept_waiting: bool  # under this leader, in round after round


@dataclass(frozen=True, slots=True)
class Done:
    """The sender holds the whole result."""

    ballot: Ballot
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The sender is at it, and has waited longer than its deadline for these ranks (none, if it moves).

    incomplete: what others wait for still comes to it: contributions to parts that it reduces, or results
    that it passes on.
    """

    ballot: Ballot
    contributions: tuple[int, ...]
    results: tuple[int, ...]
    incomplete: bool


@dataclass(frozen=True, slots=True)
class Complain:
    """`peer` sent something that cannot be used, or cannot go on. None: nobody is to blame."""

    ballot: Ballot
    peer: PeerId | None
    why: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The ballot's result is the epoch's average. A fact: anybody may tell it."""

    ballot: Ballot
    weights: tuple[float, ...]
    samples: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """The ballot is void. `by`: the ballot that decided it."""

    ballot: Ballot
    by: Ballot
    cause: Cause
    words: str  # the same for people, with what is known beyond it
    blamed: tuple[PeerId, ...]
    final: bool  # all attempts of this epoch failed


@dataclass(frozen=True, slots=True)
class Inquire:
    """What became of this ballot? Answered by Committed, Aborted or Unknown."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Unknown:
    """Answer to Inquire: not decided here; `epoch` and `lineage` are where the sender stands."""

    ballot: Ballot
    epoch: int
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class CatchUp:
    """From a newcomer to all: rounds must wait for it, because results come faster than its link takes them
    beside the state, or, for a moment, until it knows whether they do.
    """

    epoch: int  # the next result that it lacks
    spare: int  # results that it may lack when a round begins; 0: the next one waits until it takes part
    seconds: float  # how long rounds may wait for it, in all; 0: they need not wait
    state_bytes: int
    result_bytes: int  # of one epoch's result
    link_bps: float  # bit/s that the link brings; 0: not known yet


@dataclass(frozen=True, slots=True)
class Links:
    """To the leader, when it changed or something was measured: for the next plan."""

    links: tuple[tuple[PeerId, float, float], ...]  # bit/s brought, and round trip in seconds; 0.0: unknown


@dataclass(frozen=True, slots=True)
class Departing:
    """The sender leaves the run on purpose, and answers no question any more: these are its last words."""

    epoch: int
    held: tuple[Held, ...]  # the last ballots that it knew, as it would tell a successor; at most two


Message = (
    Progress
    | Totals
    | Follow
    | Prepare
    | Query
    | Promise
    | Refuse
    | Ready
    | Unready
    | Begin
    | Begun
    | Done
    | Stalled
    | Complain
    | Committed
    | Aborted
    | Inquire
    | Unknown
    | CatchUp
    | Links
    | Departing
)
