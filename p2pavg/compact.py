"""CompactReport: the bounded form of a RoundReport that travels to watchers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from p2pavg.distance import Distance
from p2pavg.report import RoundReport

VERSION = 1
MAX_BYTES = 200  # of the encoded form; a whole record has to fit a datagram
_DISTANCES = tuple(Distance)
_COUNTS = 7  # whole numbers before the milliseconds
_SECONDS = 8
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What watchers are told of one epoch of one peer; names as in RoundReport, seconds to the ms."""

    epoch: int
    attempts: int
    members: int
    samples: int
    local_samples: int
    samples_discarded: int
    bytes_received: int
    seconds_total: float
    seconds_calculation: float
    seconds_waiting: float
    seconds_matchmaking: float
    seconds_transfer: float
    seconds_commit: float
    seconds_update: float
    seconds_overlapped: float
    sent: dict[Distance, int] = field(default_factory=dict)  # bytes, by class of link

    @classmethod
    def of(cls, report: RoundReport) -> CompactReport:
        """The form that travels."""
        return cls(
            report.epoch,
            report.attempts,
            len(report.members),
            report.samples,
            report.local_samples,
            report.samples_discarded,
            report.bytes_received,
            report.seconds_total,
            report.seconds_calculation,
            report.seconds_waiting,
            report.seconds_matchmaking,
            report.seconds_transfer,
            report.seconds_commit,
            report.seconds_update,
            report.seconds_overlapped,
            report.sent_by_distance,
        )

    @property
    def granularity(self) -> float:
        """Calculation time over communication time; inf when nothing was communicated."""
        spent = self.seconds_waiting + self.seconds_matchmaking + self.seconds_transfer + self.seconds_commit
        return self.seconds_calculation / spent if spent > 0 else float("inf")

    def encode(self) -> bytes:
        """At most MAX_BYTES of msgpack, the version first."""
        counts = [
            self.epoch,
            self.attempts,
            self.members,
            self.samples,
            self.local_samples,
            self.samples_discarded,
            self.bytes_received,
        ]
        seconds = [
            self.seconds_total,
            self.seconds_calculation,
            self.seconds_waiting,
            self.seconds_matchmaking,
            self.seconds_transfer,
            self.seconds_commit,
            self.seconds_update,
            self.seconds_overlapped,
        ]
        sent = [self.sent.get(where, 0) for where in _DISTANCES]
        numbers = [*counts, *(round(1000 * value) for value in seconds), *sent]
        packed: bytes = msgpack.packb([VERSION, *(max(0, min(number, _MOST)) for number in numbers)])
        return packed

    @classmethod
    def decode(cls, data: object) -> CompactReport | None:
        """The inverse of `encode`; None for what is of another version, or what no correct peer writes."""
        if not isinstance(data, bytes) or not 0 < len(data) <= MAX_BYTES:
            return None
        try:
            numbers: Any = msgpack.unpackb(data)
        except Exception:  # msgpack raises many kinds
            return None
        expected = 1 + _COUNTS + _SECONDS + len(_DISTANCES)
        if not isinstance(numbers, list) or len(numbers) < expected or numbers[0] != VERSION:
            return None
        numbers = numbers[1:expected]
        if any(type(number) is not int or not 0 <= number <= _MOST for number in numbers):
            return None
        counts, rest = numbers[:_COUNTS], numbers[_COUNTS:]
        seconds: list[Any] = [number / 1000 for number in rest[:_SECONDS]]
        sent = dict(zip(_DISTANCES, rest[_SECONDS:], strict=True))
        return cls(*counts, *seconds, {where: count for where, count in sent.items() if count})
