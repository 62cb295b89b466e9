"""Roles, seats, generations and members, of which events, actions and messages speak. Plain frozen data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from p2pavg.rounds.protocol.ballot import Lineage, PeerId


class Role(StrEnum):
    """What a peer is in the run."""

    TRAINER = "trainer"  # has the state of its (epoch, lineage), contributes
    JOINER = "joiner"  # waits for the run's state; no member of any round
    WATCHER = "watcher"  # looks on; never a member


@dataclass(frozen=True, slots=True)
class Generation:
    """One applied epoch in a peer's history: the lineage after that epoch, and the transfer that made
    the average.
    """

    epoch: int  # the epoch that the average ended; the peer then stood at epoch + 1
    lineage: Lineage  # after this epoch
    transfer: int
    samples: int  # of all members
    total: int  # samples of the whole lineage so far
    leader: PeerId  # the peer that led the epoch, and goes on leading


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a group, in rank order."""

    peer: PeerId
    voter: bool  # False: the member has yet to apply the last average, owns nothing, and is not waited for


@functools.lru_cache(maxsize=16)
def seated(peers: tuple[PeerId, ...], voters: tuple[bool, ...]) -> tuple[Seat, ...]:
    """The seats of these members, in rank order. The same ones mostly meet again."""
    return tuple(map(Seat, peers, voters))


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a peer measured of a link to another peer. 0.0: unknown."""

    bps: float = 0.0  # bit/s that the link brings
    rtt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanMember:
    """The properties of a member on which the plan of a round may depend."""

    peer: PeerId
    voter: bool
    upload_bps: float  # 0.0: unknown
    download_bps: float
    owns: bool = True  # False: some members have no link to this one
    links: Mapping[PeerId, LinkFacts] = field(default_factory=dict)  # to others, where measured
    region: str = ""  # as the member names its place; "": it names none
