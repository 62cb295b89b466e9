"""The control messages of the rounds. How they travel: see `wire`."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.plan import Plan
from p2pavg.rounds.protocol.ballot import Ballot, Held, Lineage, Note, PeerId
from p2pavg.rounds.protocol.causes import Cause, Objection

Signed = int  # it may be negative


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a peer stands. To the leader often, to everybody when (epoch, lineage, state) changes."""

    # The epoch after the sender's last commit: for it the sender accumulates, or will once the average is
    # applied.
    epoch: int
    lineage: Lineage
    samples: int
    rate: float  # samples per second
    boundary: bool  # whether the training thread waits at a step() boundary
    pending: bool  # whether the last committed average is not applied yet
    joining: bool  # whether the sender downloads the state of (epoch, lineage)
    total: int  # samples of the sender's whole lineage
    camp: int  # how many live trainers stand where the sender stands, the sender included
    step_s: float  # seconds of the last step
    step_samples: int  # samples that the last step counted
    leader: PeerId | None  # the peer that the sender follows
    up_bps: float  # bit/s that the sender can send (below: receive); 0: not measured yet
    down_bps: float
    # Live trainers to which the sender has no link, or a link that a third peer carries.
    apart: tuple[PeerId, ...]
    met: tuple[PeerId, ...]  # peers to which the sender has a link though neither side can be dialled


@dataclass(frozen=True, slots=True)
class Totals:
    """From the leader: what all others together have reported for this epoch."""

    epoch: int
    lineage: Lineage
    others: Signed  # negative where an epoch counts more than its target, for what rounds may cost


@dataclass(frozen=True, slots=True)
class Follow:
    """Answer to a Progress that reached a peer that does not lead: whom that peer follows."""

    epoch: int
    lineage: Lineage
    leader: PeerId


@dataclass(frozen=True, slots=True)
class Prepare:
    """A leader proposes a group: promise this ballot, arrive at your next boundary."""

    ballot: Ballot
    members: tuple[PeerId, ...]  # rank order
    voters: tuple[bool, ...]
    # Parts of (owner rank, start, count, deputy ranks, whether owner and deputy swap partial means), the
    # group of each member, and whether the parts are contributions that all members get.
    plan: Plan


@dataclass(frozen=True, slots=True)
class Query:
    """A successor asks for the last ballot held, and forbids any later step in a lower one."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer to Prepare and Query: accepted; `held` is the last ballot of the epoch that the sender
    held before.
    """

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
    promised: Ballot | None  # the higher, or still living, ballot that the sender is bound to
    missing: tuple[PeerId, ...]  # members that the sender has no link to


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender's training thread waits at a boundary with this contribution, which holds for that
    wait alone. To the leader, this says also what Progress would say of the wait.
    """

    ballot: Ballot
    wait: int  # the number of the wait, from 1 on
    samples: int
    weight: float
    note: Note
    step_s: float  # as in Progress
    step_samples: int


@dataclass(frozen=True, slots=True)
class Unready:
    """The wait is over: the contribution that was declared for it does not hold any more."""

    ballot: Ballot
    wait: int


@dataclass(frozen=True, slots=True)
class Begin:
    """All have promised: gradients may flow, with these weights."""

    ballot: Ballot
    weights: tuple[float, ...]
    samples: tuple[int, ...]
    # Per rank, the wait whose declaration counts; 0: the member computes on, its samples count later.
    waits: tuple[int, ...]
    note: Note  # the leader's, if the leader is ready, else the first ready member's; all members step by it


@dataclass(frozen=True, slots=True)
class Begun:
    """The sender began this round: members compare what their leader told each, and whether it keeps
    them waiting.
    """

    ballot: Ballot
    digest: bytes  # of BEGIN
    kept_waiting: bool  # whether this leader kept the sender waiting in round after round


@dataclass(frozen=True, slots=True)
class Done:
    """The sender holds the whole result."""

    ballot: Ballot
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The sender still works on the round, and has waited longer than a deadline for these ranks (none: data
    moves).

    lacks: the first of these that the sender still receives, and of which it makes what others wait for: 0:
    contributions of members, 1: partial means, 2: results that it passes on; 3: none of them.
    """

    ballot: Ballot
    contributions: tuple[int, ...]
    results: tuple[int, ...]
    lacks: int


@dataclass(frozen=True, slots=True)
class Complain:
    """`peer` sent something unusable, or cannot go on. None: nobody is to blame."""

    ballot: Ballot
    peer: PeerId | None
    why: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The ballot's result is the epoch's average. This is a fact, which anybody may tell."""

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
    words: str  # the cause in words for people, with details
    blamed: tuple[PeerId, ...]
    final: bool  # all attempts of this epoch failed


@dataclass(frozen=True, slots=True)
class Inquire:
    """What became of this ballot? Answered by Committed, Aborted or Unknown."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Unknown:
    """Answer to Inquire: the sender knows no decision; the sender stands at (`epoch`, `lineage`)."""

    ballot: Ballot
    epoch: int
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class CatchUp:
    """From a newcomer to all: rounds must wait for the newcomer, because results come faster than its link
    takes them beside the state, or for a moment, until the newcomer knows whether they do.
    """

    epoch: int  # the next result that the newcomer lacks
    spare: int  # results that the newcomer may lack when a round begins; 0: the next round waits for it
    seconds: float  # how long rounds may wait for the newcomer, in all; 0: they need not wait
    state_bytes: int
    result_bytes: int  # of one epoch's result
    link_bps: float  # bit/s that the newcomer's link brings; 0: not known yet


@dataclass(frozen=True, slots=True)
class Links:
    """To the leader, when the leader changed or something was measured: for the next plan."""

    links: tuple[tuple[PeerId, float, float], ...]  # bit/s brought, and round trip in seconds; 0.0: unknown


@dataclass(frozen=True, slots=True)
class Departing:
    """The sender leaves the run on purpose and answers no more questions: these are its last words."""

    epoch: int
    held: tuple[Held, ...]  # the last ballots that the sender knew, as a successor would be told; at most two


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
