"""Events that go into the rounds machine: plain frozen data, no I/O. The actions that come out: see
actions.py.

Peers are 20-byte ids, lineages 32-byte digests, times seconds of a monotonic clock, rates samples or bit per
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2pavg.rounds.protocol.ballot import Lineage, Note, PeerId
from p2pavg.rounds.protocol.messages import Message
from p2pavg.rounds.protocol.roles import Generation, LinkFacts, Role


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """Where the training thread is. Fed when the thread arrives at a boundary, and with every Tick while it
    computes.

    samples: counted samples that no average includes; they only grow until Commit, Healed or Discard.
    weight: the weight of this peer's mean in the average; None: the number of samples.
    at_boundary: the thread waits in step() with a fixed contribution (samples may be 0: nothing to
    contribute) and has no outcome yet; False as soon as the thread got Resume, Commit, RoundFailed or a
    state.
    step_seconds, step_samples: how long the last step took and what it counted; 0 before the first.
    note: for everybody's coming step, if this peer leads the round.
    """

    samples: int
    samples_per_second: float
    at_boundary: bool
    weight: float | None = None
    step_seconds: float = 0.0
    step_samples: int = 0
    upload_bps: float = 0.0  # bit/s, as measured; 0.0: not measured yet
    download_bps: float = 0.0
    note: Note = b""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A control link to a peer is ready; the facts are those of its hello. Data streams follow."""

    peer: PeerId
    epoch: int
    lineage: Lineage
    role: Role = Role.TRAINER
    client_only: bool = False
    total_samples: int = 0  # of the peer's lineage
    leader: PeerId | None = None  # the peer that it follows
    upload_bps: float = 0.0  # 0.0: unknown
    rtt_s: float = 0.0  # 0.0: unknown
    relayed: bool = False  # a third member carries the link, within a cap
    region: str = ""  # the place of the peer, as the peer names it


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The link to a peer is gone (closed, reset, or given up), or the peer left."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Apart:
    """All trainers of the run that live, as others say, and to which this peer gets no link."""

    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Moved:
    """This machine lost the address at which its links began: they are gone, and come back from another one.

    To be told before the links' `PeerDown`.
    """


@dataclass(frozen=True, slots=True)
class Received:
    """A control message, already parsed."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class PeerHealth:
    """The heartbeats of one link, as seconds of age now."""

    peer: PeerId
    heard_s: float  # since anything was heard or, if that is longer ago, since the peer acknowledged anything
    loop_s: float  # since the peer's event loop was last known to turn
    trainer_s: float  # since the peer's training thread last called step()
    rtt_s: float = 0.0  # 0.0: unknown


@dataclass(frozen=True, slots=True)
class Health:
    """Fed periodically (every `Machine.health_interval` seconds) for all links."""

    peers: tuple[PeerHealth, ...]


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """Fed when something new was measured of the links to other peers: all that is known of them."""

    links: Mapping[PeerId, LinkFacts]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far the exchange with one member is. Counts of chunks and link bytes; monotone."""

    contributions: int  # chunks from this rank that this peer reduces
    results: int  # result chunks that this rank returned or passed on
    contributions_expected: int
    results_expected: int
    bytes_received: int = 0  # gradient bytes on this rank's data streams, unfinished chunks included


@dataclass(frozen=True, slots=True)
class JobProgressed:
    """Fed periodically while a job runs."""

    transfer: int
    ranks: tuple[RankProgress, ...]  # by rank; this peer's own entry is ignored
    first_byte_at: float = 0.0  # 0.0: no gradient byte yet


@dataclass(frozen=True, slots=True)
class JobDone:
    """The whole result is in."""

    transfer: int
    digests: tuple[bytes, ...]  # one of 32 bytes per part
    ranks: tuple[RankProgress, ...] = ()  # as in JobProgressed; empty: not known


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
    rank: int | None = None  # the rank that is the reason; None: no rank


@dataclass(frozen=True, slots=True)
class Applied:
    """The training thread has applied the last Commit and stands at `epoch` (= committed + 1)."""

    epoch: int
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class Healed:
    """The training thread loaded a downloaded state; the accumulated gradients are gone from its buffer.

    Followed comes for each result that the thread applies on top, and Level after the last.
    """

    epoch: int
    lineage: Lineage
    history: tuple[Generation, ...] = ()  # the donor's (Machine.history), newest last
    dropped: int = 0  # samples that the training thread had accumulated when it loaded the state


@dataclass(frozen=True, slots=True)
class Followed:
    """The training thread applied the result of an epoch that the others made without this peer."""

    epoch: int
    before: Lineage  # where the thread stood
    lineage: Lineage  # where the thread stands now
    transfer: int
    samples: int  # of all members
    leader: PeerId


@dataclass(frozen=True, slots=True)
class Donors:
    """These peers, of all that were asked, give the state, or the results that follow on the own state."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """The training thread has applied all results so far: this peer can take part from here on."""


@dataclass(frozen=True, slots=True)
class HealFailed:
    """No donor could give the state, or the results since; the machine names other donors later."""

    why: str


@dataclass(frozen=True, slots=True)
class Discard:
    """The training thread dropped its accumulated samples (and reports them itself)."""

    why: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run: at once between rounds, and after the outcome inside a round. The action Left is the
    end.

    notice_s: how long the departure may take. hand_over: the training thread waits at a boundary for good,
    and its samples may go to another peer (HandOver).
    """

    notice_s: float = 5.0
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The answer to HandOver.

    taken: a receiver counts the samples as its own from now on. behind: the samples were too old for
    the peers that stay. counted: the transfer in whose average they are already, as a receiver knows.
    unknown: the receiver that has them did not say whether it took them.
    """

    taken: bool
    behind: bool = False
    counted: int | None = None
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Inherited:
    """A peer that left gave its samples to this one. The peer counted them in `epoch`, and offered some of
    them to
    transfers whose outcome it did not learn: (transfer, samples) each.
    """

    epoch: int
    offered: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `Machine.next_deadline` is reached, or a regular beat is due."""


Event = (
    LocalProgress
    | PeerUp
    | PeerDown
    | Apart
    | Moved
    | Received
    | Health
    | LinksMeasured
    | JobProgressed
    | JobDone
    | JobRefused
    | JobFailed
    | Applied
    | Healed
    | Followed
    | Donors
    | Level
    | HealFailed
    | Discard
    | Leave
    | HandedOver
    | Inherited
    | Tick
)
