"""RoundReport: what one round measured, and the quantities derived from it. Pure data and functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member of a round."""

    peer: str  # peer id, hex
    weight: float  # 0: straggler or joiner
    samples: int
    voter: bool


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What one link did during the round."""

    peer: str
    bytes_sent: int
    bytes_received: int
    streams: int
    rtt_s: float
    window_bytes: int
    rate_bps: float  # bit/s delivered by the kernel's own estimate, summed over streams


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One epoch of one peer. All seconds are wall clock; the phases follow each other and add up to
    `seconds_total`.

    `overlapped`: transfer, commit and update ran behind the next epoch's calculation (delayed updates), so
    that the
    phases of two epochs overlap.
    """

    run_id: str
    peer: str
    epoch: int
    attempts: int
    leader: str
    lineage: str  # after the epoch, hex
    members: tuple[MemberReport, ...]
    samples: int  # of all members, in this average
    local_samples: int
    samples_discarded: int
    discarded_why: tuple[str, ...]
    failed_members: tuple[str, ...]
    causes: tuple[str, ...]  # why attempts failed, in words
    seconds_calculation: float
    seconds_waiting: float  # at the boundary, until the round began to form
    seconds_matchmaking: float  # ballot and group
    seconds_transfer: float  # first contribution to last result
    seconds_commit: float
    seconds_update: float  # decode, optimizer step, parameter write-back
    seconds_total: float
    bytes_sent: int
    bytes_received: int
    codec: str
    first_byte_at: float = 0.0  # time.monotonic() of the first gradient byte sent or received, 0.0: none
    last_byte_at: float = 0.0
    links: tuple[LinkReport, ...] = ()
    overlapped: bool = False
    finished_at: float = 0.0  # time.time()
    extra: Mapping[str, float] = field(default_factory=dict)  # e.g. loss, logged by the user

    @property
    def seconds_communication(self) -> float:
        """Everything between the end of calculation and the start of the update."""
        return self.seconds_waiting + self.seconds_matchmaking + self.seconds_transfer + self.seconds_commit

    @property
    def granularity(self) -> float:
        """Calculation time over communication time of the epoch; inf when nothing was communicated."""
        spent = self.seconds_communication
        return self.seconds_calculation / spent if spent > 0 else float("inf")

    @property
    def samples_per_second(self) -> float:
        """Global samples over this epoch's wall clock."""
        return self.samples / self.seconds_total if self.seconds_total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, derived quantities included."""
        data = asdict(self)
        data["granularity"] = None if self.granularity == float("inf") else self.granularity
        data["samples_per_second"] = self.samples_per_second
        return data

    def to_json(self) -> str:
        """One line of JSONL."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)
