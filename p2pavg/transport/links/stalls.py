"""When a stream or a whole link has gone quiet, and which chunks to ask for again then. Pure: counters
and `now` in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from p2pavg.transport.engine import Missing, ReduceJob, StreamStats

# A tick in which a stream moved less than this counts as quiet: heartbeats alone are less.
_QUIET_BYTES = 1024
_RTO_MIN_S = 0.2  # Linux: a retransmission timeout is the round trip plus at least this
_GAPS = 4.0
_AGAIN_AT_LEAST_EVERY_S = 5.0
_STALLED_S = 0.5  # seconds without progress, at least, and at least 1.5 timeouts of the kernel
_STALLED_TIMEOUTS = 1.5
_STALLED_PAUSES = 2.0  # a stream has stalled after this multiple of its longest recent pause
_PAUSE_KEPT = 0.99  # share of the longest pause that each tick keeps
_LATE_RTTS, _LATE_S = 1.25, 0.05  # a later acknowledgement means a loss or a long queue


@dataclass(slots=True)
class _Stream:
    received: int
    acked: int
    waiting: bool  # whether sent bytes are not acknowledged yet
    busy_at: float  # time of the last received bytes
    acked_at: float  # time of the last acknowledgement, or of having none to wait for
    rtt_s: float  # the kernel's smoothed RTT, under load
    idle: bool = True  # whether the kernel holds heartbeats only


@dataclass(slots=True)
class LinkWatch:
    """The recent activity of a link's streams, fed with their statistics at every tick."""

    streams: dict[int, _Stream] = field(default_factory=dict)
    lost_at: float = 0.0  # time at which a stream last closed
    busy_at: float = 0.0  # time at which any stream last received bytes
    acked_at: float = 0.0  # time of the last acknowledgement on any stream
    pause: float = 0.0  # the longest recent time between acknowledgements of a stream with bytes in flight

    def tick(self, now: float, stats: Sequence[StreamStats]) -> None:
        self.pause *= _PAUSE_KEPT
        seen = {row.stream for row in stats}
        for number in [number for number in self.streams if number not in seen]:
            del self.streams[number]
            self.lost_at = now
        for row in stats:
            acked = row.acked_bytes
            stream = self.streams.get(row.stream)
            if stream is None:
                self.streams[row.stream] = _Stream(row.arrived_bytes, acked, False, 0.0, now, row.rtt_s)
                continue
            if row.arrived_bytes - stream.received > _QUIET_BYTES:
                stream.busy_at = self.busy_at = now
            if acked > stream.acked:
                if stream.waiting:
                    self.pause = max(self.pause, now - stream.acked_at)
                stream.acked_at = self.acked_at = now
            elif not (row.unacked_bytes and stream.waiting):
                stream.acked_at = now
            stream.received, stream.acked, stream.rtt_s = row.arrived_bytes, acked, row.rtt_s
            stream.waiting = row.unacked_bytes > 0
            stream.idle = row.unacked_bytes + row.unsent_bytes < _QUIET_BYTES

    def stalled(self, now: float, rtt_s: float, heard_at: float) -> list[int]:
        """Streams on which nothing has been acknowledged for so long that a fresh one is better.

        heard_at: when the control connection last received bytes. While no stream moves, the cause is the
        path or a busy machine, and not the stream. A receiver that does not read does not count as a stall
        either: no bytes are sent then that could be acknowledged.
        """
        moved_at = max(self.busy_at, self.acked_at, heard_at)
        found = []
        for number, stream in self.streams.items():
            timeouts = _STALLED_TIMEOUTS * patience(max(rtt_s, stream.rtt_s))
            wait = max(_STALLED_S, timeouts, _STALLED_PAUSES * self.pause)
            if now - stream.acked_at > wait and moved_at - stream.acked_at > wait / 2:
                found.append(number)
        return found

    def late(self, now: float, rtt_s: float) -> list[int]:
        """Streams that hold back chunks which others of the link could deliver sooner: nothing has been
        acknowledged for longer than a round trip takes now, though others moved and have nothing left to
        send; or not even for a timeout, while others move.
        """
        found = []
        for number, stream in self.streams.items():
            if not stream.waiting:
                continue
            others = [other for other in self.streams.values() if other is not stream]
            loaded = max([rtt_s, *(other.rtt_s for other in others)])
            unused = any(other.idle for other in others)
            wait = _LATE_RTTS * loaded + _LATE_S if unused else patience(loaded)
            moved = self.acked_at - stream.acked_at > (0.0 if unused else wait / 2)
            if moved and now - stream.acked_at > wait:
                found.append(number)
        return found

    def moving(self, now: float, rtt_s: float) -> bool:
        """Whether bytes are in flight, and the other side acknowledges them on every stream that has any."""
        waiting = [stream for stream in self.streams.values() if stream.waiting]
        return bool(waiting) and all(
            now - stream.acked_at <= max(patience(max(rtt_s, stream.rtt_s)), self.pause) for stream in waiting
        )


Chunk = tuple[int, int]  # (part, index)


@dataclass(slots=True)
class KindWatch:
    """The chunks of one kind that one member owes in one job."""

    arrived: int = 0
    at: float = 0.0  # time of the last chunk
    gap: float = 0.0  # usual seconds between two chunks; longer than any timeout on a slow path

    def tick(self, now: float, arrived: int) -> None:
        if arrived > self.arrived:
            gap = (now - (self.at or now)) / (arrived - self.arrived)
            self.gap = max(gap, 0.7 * self.gap)
            self.arrived, self.at = arrived, now

    def stopped(self, now: float, wait: float) -> bool:
        """Whether chunks came, and then none for `wait` seconds and for several times the usual gap."""
        return self.arrived > 0 and now - self.at > max(wait, _GAPS * self.gap)


@dataclass(slots=True)
class Again:
    """Chunks of one kind in one job that were sent to one member again."""

    sent: dict[Chunk, tuple[int, float]] = field(
        default_factory=dict
    )  # by chunk: how often it was sent again, and when last

    def choose(self, now: float, patience: float, chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        """The chunks that were not sent again lately. Each time doubles the wait before the next."""
        found = []
        for chunk in chunks:
            times, last = self.sent.get(chunk, (0, -math.inf))
            if now - last >= min(patience * 2.0 ** (times - 1), _AGAIN_AT_LEAST_EVERY_S):
                self.sent[chunk] = (times + 1, now)
                found.append(chunk)
        return tuple(found)


@dataclass(slots=True)
class RankWatch:
    """One member of one job: which chunks to ask of it again, and which were sent to it again."""

    since: float  # when the job began
    contributions: KindWatch = field(default_factory=KindWatch)
    results: KindWatch = field(default_factory=KindWatch)
    contributions_again: Again = field(default_factory=Again)
    results_again: Again = field(default_factory=Again)
    _asked_at: float = -math.inf

    def suspicious(self, now: float, rtt_s: float, link: LinkWatch) -> bool:
        """Whether chunks may have been lost: a stream closed, or went quiet after it had carried chunks."""
        active = [stream.busy_at for stream in link.streams.values() if stream.busy_at > self.since]
        return link.lost_at > self.since or any(now - busy_at > patience(rtt_s) for busy_at in active)

    def ask(
        self, now: float, rtt_s: float, link: LinkWatch, job: ReduceJob, rank: int, missing: Missing
    ) -> Missing:
        """The chunks of `missing` to ask `rank` for, once the link looks suspicious.

        All of a kind of which none has arrived for a while, or all on a quiet link; else what later chunks
        have overtaken. Nothing when it was asked a moment ago.
        """
        wait = patience(rtt_s)
        if now - self._asked_at < wait:
            return Missing((), ())
        quiet = now - max(link.busy_at, self.since) > wait
        behind = overtaken(job, rank, missing, max(1, len(link.streams)))
        asked = Missing(
            missing.contributions if quiet or self.contributions.stopped(now, wait) else behind.contributions,
            missing.results if quiet or self.results.stopped(now, wait) else behind.results,
        )
        if asked.contributions or asked.results:
            self._asked_at = now
        return asked


def patience(rtt_s: float) -> float:
    """How long nothing comes before that means something: the kernel's least retransmission timeout."""
    return rtt_s + _RTO_MIN_S


def overtaken(job: ReduceJob, rank: int, missing: Missing, streams: int) -> Missing:
    """The part of `missing` (from `rank`) that twice as many later chunks as there are streams have
    overtaken.

    Chunks of one kind leave in order and every stream carries one at a time, so these are lost or stuck.
    """
    plan, parts = job.plan, range(len(job.parts))
    contributions = [part for part in parts if plan.receiver(part, rank) == job.rank]
    results = [part for part in parts if plan.parent(part, job.rank) == rank]
    return Missing(
        _overtaken(job, contributions, set(missing.contributions), 2 * streams),
        _overtaken(job, results, set(missing.results), 2 * streams),
    )


def _overtaken(
    job: ReduceJob, parts: Sequence[int], missing: Collection[Chunk], enough: int
) -> tuple[Chunk, ...]:
    found: list[Chunk] = []
    later = 0
    for part in reversed(parts):
        for index in reversed(range(-(-job.parts[part].count // job.chunk_elements))):
            if (part, index) not in missing:
                later += 1
            elif later >= enough:
                found.append((part, index))
    return tuple(reversed(found))
