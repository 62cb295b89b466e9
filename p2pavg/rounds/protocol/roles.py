"""What events, actions and messages speak of: roles, seats, generations. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from p2pavg.rounds.protocol.ballot import Lineage, PeerId


class Role(StrEnum):
    """What a peer is in the run."""

    TRAINER = "trainer"  # has the state of its (epoch, lineage), contributes
    JOINER = "joiner"  # waits for its state; no member of any round
    WATCHER = "watcher"  # looks on; never a member


@dataclass(frozen=True, slots=True)
class Generation:
    """One applied epoch in a peer's history: the lineage after it, and which transfer made it."""

    epoch: int  # the epoch that this average ended; the peer then stood at epoch + 1
    lineage: Lineage  # after it
    transfer: int
    samples: int  # of all members
    total: int  # samples of the whole lineage so far
    leader: PeerId  # who led the epoch, and goes on leading


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a group, in rank order."""

    peer: PeerId
    voter: bool  # False: it has yet to apply the last average; owns nothing, is not waited for


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a peer measured of its link to another one. 0.0: unknown."""

    bps: float = 0.0  # bit/s that it brings
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanMember:
    """What the plan of a round may depend on."""

    peer: PeerId
    voter: bool
    upload_bps: float  # 0.0: unknown
    download_bps: float
    owns: bool = True  # False: others have no link to it
    links: Mapping[PeerId, LinkFacts] = field(default_factory=dict)  # to others, where measured
    region: str = ""  # as it names it; "": it does not
