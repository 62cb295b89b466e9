"""What a machine is built with, and never changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pavg.plan import Plan
from p2pavg.rounds.machine.rules.notes import Combine, of_leader
from p2pavg.rounds.machine.rules.spacing import Spacing
from p2pavg.rounds.protocol.ballot import Lineage, PeerId
from p2pavg.rounds.protocol.roles import Generation, PlanMember, Role

Planner = Callable[[Sequence[PlanMember]], Plan]
Spaced = Callable[[Sequence[PlanMember]], Spacing]
MOST_STEP = 1 << 30  # samples of one step, in lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings with which a machine is built.

    A JOINER has no state yet: it downloads one first. `life` tells this life of the peer from its earlier
    lives: each life has a larger number, by more than the ballots that one life opens (nanoseconds of the
    wall clock).
    """

    me: PeerId
    run_id: str
    epoch: int
    lineage: Lineage
    target: int  # samples per epoch, over all peers
    plan: Planner  # from the members in rank order
    spacing: Spaced | None = None  # how far apart rounds of these members must be; None: as the samples come
    role: Role = Role.TRAINER
    history: tuple[Generation, ...] = ()
    region: str = ""  # the place of this peer, as the peer names it
    client_only: bool = False  # others cannot dial this peer
    patience_s: float | None = None  # how long stragglers are waited for; None: from measurements
    lockstep: bool = False  # one step of each peer present closes a round, however many samples that is
    combine: Combine = of_leader
    weighted: bool = False  # contributions have weights of their own; else each weighs as much as its samples
    life: int = 0
