"""When a stream or a whole link has gone quiet, and which chunks to ask for again then. Pure: counters
and `now` in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from p2pavg.transport.engine import Missing, ReduceJob, StreamStats

# A tick in which a stream moved less than this counts as quiet: heartbeats alone are less.
_QUIET_BYTES = 1024
_RTO_MIN_S = 0.2  # Linux: a retransmission timeout is the round trip plus at least this
_ASK_AT_MOST_EVERY_S = 5.0
_STALLED_S = 2.0  # two or three timeouts of the kernel without any progress
_STALLED_RTTS = 8.0


class Ask(Enum):
    NOTHING = 0
    OVERTAKEN = 1  # what many later chunks have overtaken
    ALL = 2  # all that is missing


@dataclass(slots=True)
class _Stream:
    received: int
    acked: int
    busy_at: float  # something was received
    acked_at: float  # the other side acknowledged something, or had nothing to acknowledge


@dataclass(slots=True)
class LinkWatch:
    """What the streams of one link have done lately. Fed with their statistics at every tick."""

    streams: dict[int, _Stream] = field(default_factory=dict)
    lost_at: float = 0.0  # a stream closed or was closed
    busy_at: float = 0.0  # any stream received something

    def tick(self, now: float, stats: Sequence[StreamStats]) -> None:
        seen = {row.stream for row in stats}
        for number in [number for number in self.streams if number not in seen]:
            del self.streams[number]
            self.lost_at = now
        for row in stats:
            acked = row.bytes_sent - row.unacked_bytes
            stream = self.streams.get(row.stream)
            if stream is None:
                self.streams[row.stream] = _Stream(row.bytes_received, acked, 0.0, now)
                continue
            if row.bytes_received - stream.received > _QUIET_BYTES:
                stream.busy_at = self.busy_at = now
            if acked > stream.acked or not row.unacked_bytes:
                stream.acked_at = now
            stream.received, stream.acked = row.bytes_received, acked

    def stalled(self, now: float, rtt_s: float) -> list[int]:
        """Streams whose other side has acknowledged nothing for so long that a fresh one is better."""
        patience = max(_STALLED_S, _STALLED_RTTS * rtt_s)
        return [number for number, stream in self.streams.items() if now - stream.acked_at > patience]


@dataclass(slots=True)
class RankWatch:
    """One member of one job: whether, and what, to ask it to send again."""

    since: float  # when the job began
    missing: int = -1  # chunks, when last counted
    asks: int = 0
    next_at: float = 0.0

    def judge(self, now: float, rtt_s: float, link: LinkWatch) -> Ask:
        patience = rtt_s + _RTO_MIN_S
        active = [stream.busy_at for stream in link.streams.values() if stream.busy_at > self.since]
        lost = link.lost_at > self.since
        if now < self.next_at or not (active or lost):
            return Ask.NOTHING  # nothing has come yet: there is nothing to judge by
        if now - max(link.busy_at, self.since) > patience:
            return Ask.ALL
        if lost or any(now - busy_at > patience for busy_at in active):
            return Ask.OVERTAKEN
        return Ask.NOTHING

    def asked(self, now: float, rtt_s: float, missing: int) -> None:
        """Less is missing than the last time: be quick again, else wait twice as long."""
        self.asks = 1 if missing < self.missing or self.missing < 0 else self.asks + 1
        self.missing = missing
        self.next_at = now + min((rtt_s + _RTO_MIN_S) * 2.0 ** (self.asks - 1), _ASK_AT_MOST_EVERY_S)


def overtaken(job: ReduceJob, rank: int, missing: Missing, streams: int) -> Missing:
    """The part of `missing` (from `rank`) that twice as many later chunks as there are streams have
    overtaken.

    Chunks of one kind leave in order and every stream carries one at a time, so these are lost or stuck.
    """
    contributions = [part for part in range(len(job.parts)) if job.parts[part].owner == job.rank]
    results = [part for part in range(len(job.parts)) if job.parts[part].owner == rank]
    return Missing(
        _overtaken(job, contributions, set(missing.contributions), 2 * streams),
        _overtaken(job, results, set(missing.results), 2 * streams),
    )


def _overtaken(
    job: ReduceJob, parts: Sequence[int], missing: Collection[tuple[int, int]], enough: int
) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    later = 0
    for part in reversed(parts):
        for index in reversed(range(-(-job.parts[part].count // job.chunk_elements))):
            if (part, index) not in missing:
                later += 1
            elif later >= enough:
                found.append((part, index))
    return tuple(reversed(found))
