"""Ballots and what a member remembers of the last one it held."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum

PEER_ID_BYTES = 20
LINEAGE_BYTES = 32
DIGEST_BYTES = 32

PeerId = bytes
Lineage = bytes
Note = bytes
"""What a training thread says of its coming step to the others' threads. The rounds only carry it."""


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """One attempt to average for one epoch of one lineage. Totally ordered.

    A member moves to higher ballots only, and no ballot comes twice in all lives of its leader.
    """

    epoch: int
    attempt: int
    leader: PeerId
    serial: int  # numbers the leader's ballots, over all its lives
    lineage: Lineage  # the lineage that the average is to continue

    @property
    def standing(self) -> tuple[int, Lineage]:
        """The (epoch, lineage) at which the voters of this ballot stand."""
        return self.epoch, self.lineage

    @property
    def transfer(self) -> int:
        """The 63-bit id of the attempt's data on the wire; no two ballots share an id."""
        numbers = struct.pack(">QQQ", self.epoch, self.attempt, self.serial)
        return int.from_bytes(hashlib.sha256(self.lineage + numbers + self.leader).digest()[:8], "big") >> 1


class Stage(StrEnum):
    """How far a member is in a ballot."""

    OPEN = "open"  # promised; perhaps begun, but the result is not complete
    DONE = "done"  # the whole result is in and the leader was told its digests
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Held:
    """What a member tells of the last ballot that it held: enough for a successor to decide that ballot."""

    ballot: Ballot
    stage: Stage
    begun: bool  # BEGIN was seen: the target was reached, and gradients may be on their way
    digests: tuple[bytes, ...] = ()  # of the result, when the stage is DONE or COMMITTED
    voters: tuple[PeerId, ...] = ()  # the members that a successor has to ask
    weights: tuple[float, ...] = ()  # per rank; empty before BEGIN
    samples: tuple[int, ...] = ()
