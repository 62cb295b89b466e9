"""Gives every link the number of streams that its transfers call for."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from p2pavg.identity import short_id
from p2pavg.transport import tcp_info
from p2pavg.transport.engine import SELF, Engine, ReduceJob, StreamStats
from p2pavg.transport.links.link import Link
from p2pavg.transport.links.stream_count import StreamCount, Transfer

logger = logging.getLogger("p2pavg.transport")

_ACTIVE_BYTES = 4096  # moved between two ticks: more than heartbeats


@dataclass(slots=True)
class _Meter:
    """One job on one link, while it runs."""

    streams: int
    base: tuple[int, int]  # the link's traffic when the job was first seen
    last: tuple[int, int]
    first_byte_at: float = 0.0
    nbytes: int = 0
    seconds: float = 0.0
    rtt_s: float = 0.0  # the longest under load

    def tick(
        self, now: float, traffic: tuple[int, int], stats: Sequence[StreamStats], first_byte_at: float
    ) -> None:
        self.streams = min(self.streams, len(stats))
        moved = max(traffic[0] - self.last[0], traffic[1] - self.last[1])
        if moved > _ACTIVE_BYTES and 0.0 < first_byte_at < now:
            self.nbytes = max(traffic[0] - self.base[0], traffic[1] - self.base[1])
            self.seconds = now - first_byte_at
            self.rtt_s = max(self.rtt_s, statistics.median(row.rtt_s for row in stats) if stats else 0.0)
        self.last = traffic


class StreamCounts:
    def __init__(
        self, engine: Engine, links: Mapping[int, Link], set_streams: Callable[[Link, int], None]
    ) -> None:
        """links: by id, live view."""
        self._engine = engine
        self._links = links
        self._set_streams = set_streams
        self._counts: dict[int, StreamCount] = {}
        self._meters: dict[tuple[int, int], _Meter] = {}
        self._window_limit = tcp_info.window_limit_bytes()

    def links_changed(self) -> None:
        """A link came or went: everybody's share is another."""
        for number in [number for number in self._counts if number not in self._links]:
            del self._counts[number]
        for link in list(self._links.values()):
            if link.id not in self._counts:
                self._counts[link.id] = StreamCount(link.rtt_min, self._window_limit)
            self._apply(link)

    def _apply(self, link: Link) -> None:
        self._set_streams(link, self._counts[link.id].wanted(len(self._links)))

    def tick(self, now: float, jobs: Sequence[ReduceJob]) -> None:
        """Called some times per second while jobs run, and once after."""
        current = {(job.transfer, link): job for job in jobs for link in job.links if link != SELF}
        for key in [key for key in self._meters if key not in current]:
            self._over(key[1], self._meters.pop(key))
        for key, job in current.items():
            if key[1] in self._links:
                self._measure(now, key, job)

    def _measure(self, now: float, key: tuple[int, int], job: ReduceJob) -> None:
        traffic, stats = self._engine.traffic(key[1]), self._engine.stats(key[1])
        meter = self._meters.get(key)
        if meter is None:
            self._meters[key] = _Meter(len(stats), traffic, traffic)
        else:
            meter.tick(now, traffic, stats, self._engine.progress(job.transfer).first_byte_at)

    def _over(self, number: int, meter: _Meter) -> None:
        link, count = self._links.get(number), self._counts.get(number)
        if link is None or count is None or meter.seconds <= 0:
            return
        before = count.wanted(len(self._links))
        queue = max(0.0, meter.rtt_s - link.rtt_min)
        transfer = Transfer(meter.streams, meter.nbytes, meter.seconds, link.rtt_min, queue)
        count.measured(transfer, len(self._links))
        after = count.wanted(len(self._links))
        if after != before:
            logger.info(
                "peer %s: %d streams carried %.0f Mb/s (round trip %.1f ms, queue %.1f ms), now %d",
                short_id(link.peer_id),
                transfer.streams,
                1e-6 * transfer.goodput_bps,
                1e3 * link.rtt_min,
                1e3 * queue,
                after,
            )
        self._apply(link)
