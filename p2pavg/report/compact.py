"""CompactReport: the bounded form of a RoundReport that travels to watchers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from p2pavg.report import PHASES, RoundReport
from p2pavg.report.distance import Distance

VERSION = 1
MAX_BYTES = 200  # of the encoded form; a whole record has to fit a datagram
_DISTANCES = tuple(Distance)
_COUNTS = (
    "epoch",
    "attempts",
    "members",
    "samples",
    "local_samples",
    "samples_discarded",
    "wire_bytes_received",
)
_SECONDS = tuple(f"seconds_{name}" for name in ("total", *PHASES, "overlapped"))
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class CompactReport:
    """One epoch of one peer for watchers. Names are those of RoundReport; seconds are rounded to
    milliseconds.
    """

    epoch: int
    attempts: int
    members: int
    samples: int
    local_samples: int
    samples_discarded: int
    wire_bytes_received: int
    seconds_total: float
    seconds_calculation: float
    seconds_waiting: float
    seconds_matchmaking: float
    seconds_transfer: float
    seconds_commit: float
    seconds_update: float
    seconds_overlapped: float
    sent: dict[Distance, int] = field(default_factory=dict)  # all IP bytes, by class of link

    @classmethod
    def of(cls, report: RoundReport) -> CompactReport:
        """The compact form of a report."""
        values: dict[str, Any] = {name: getattr(report, name) for name in (*_COUNTS, *_SECONDS)}
        return cls(**{**values, "members": len(report.members)}, sent=report.sent_by_distance)

    def encode(self) -> bytes:
        """At most MAX_BYTES of msgpack, the version first."""
        numbers = [getattr(self, name) for name in _COUNTS]
        numbers += [round(1000 * getattr(self, name)) for name in _SECONDS]
        numbers += [self.sent.get(where, 0) for where in _DISTANCES]
        packed: bytes = msgpack.packb([VERSION, *(max(0, min(number, _MOST)) for number in numbers)])
        return packed

    @classmethod
    def decode(cls, data: object) -> CompactReport | None:
        """The inverse of `encode`. None: of another version, or no correct peer writes this."""
        if not isinstance(data, bytes) or not 0 < len(data) <= MAX_BYTES:
            return None
        try:
            numbers: Any = msgpack.unpackb(data)
        except Exception:  # msgpack raises many kinds
            return None
        expected = 1 + len(_COUNTS) + len(_SECONDS) + len(_DISTANCES)
        if not isinstance(numbers, list) or len(numbers) < expected or numbers[0] != VERSION:
            return None
        numbers = numbers[1:expected]
        if any(type(number) is not int or not 0 <= number <= _MOST for number in numbers):
            return None
        names = (*_COUNTS, *_SECONDS, *_DISTANCES)
        told: dict[str, Any] = dict(zip(names, numbers, strict=True))
        values = {name: told[name] for name in _COUNTS} | {name: told[name] / 1000 for name in _SECONDS}
        return cls(**values, sent={where: told[where] for where in _DISTANCES if told[where]})
