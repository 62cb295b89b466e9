"""Gives every link the number of streams that its transfers call for."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from p2pavg.identity import short_id
from p2pavg.transport import tcp_info
from p2pavg.transport.engine import SELF, Engine, ReduceJob, StreamStats
from p2pavg.transport.links.link import Link
from p2pavg.transport.links.streams.count import StreamCount, StreamTransfer

logger = logging.getLogger("p2pavg.transport")

_ACTIVE_BYTES = 4096  # sent between two ticks by an active stream; heartbeats are fewer
_BUSY_STREAMS = 0.75  # of a link's, with something unsent in the kernel: threads fill one after the other


@dataclass(slots=True)
class _Meter:
    """Measures what one job sends over one link while it runs. The other side measures its own bytes."""

    streams: int
    base: int  # bytes that the link had sent when the job was first seen
    last: int
    looks: int = 0  # ticks at which the job moved
    busy: int = 0  # of these: ticks at which more streams would have been of use
    nbytes: int = 0
    seconds: float = 0.0
    rtt_s: float = 0.0  # the longest round trip under load

    def tick(self, now: float, sent: int, stats: Sequence[StreamStats], first_byte_at: float) -> None:
        self.streams = min(self.streams, len(stats))
        if sent - self.last > _ACTIVE_BYTES and 0.0 < first_byte_at < now:
            self.looks += 1
            self.busy += sum(row.unsent_bytes > 0 for row in stats) >= _BUSY_STREAMS * len(stats)
            self.nbytes = sent - self.base
            self.seconds = now - first_byte_at
            self.rtt_s = max(self.rtt_s, statistics.median(row.rtt_s for row in stats) if stats else 0.0)
        self.last = sent

    def transfer(self, rtt_s: float) -> StreamTransfer:
        """rtt_s: the least known of the link."""
        queue = max(0.0, self.rtt_s - rtt_s)
        return StreamTransfer(
            self.streams, self.nbytes, self.seconds, rtt_s, self.busy / max(1, self.looks), queue
        )


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
        """Share the sockets out anew after a link came or went."""
        for number in [number for number in self._counts if number not in self._links]:
            del self._counts[number]
        for link in list(self._links.values()):
            if link.id not in self._counts:
                count = self._counts[link.id] = StreamCount(link.rtt_min, self._window_limit)
                if link.prior is not None and link.prior.streams:
                    count.begin_with(link.prior.streams, time.monotonic())
            self._apply(link)

    def settled(self, link: Link) -> int:
        """The number of streams on which its search ended; 0: it has not."""
        count = self._counts.get(link.id)
        return 0 if count is None else count.settled

    def _apply(self, link: Link) -> None:
        self._set_streams(link, self._counts[link.id].wanted(len(self._links)))

    def tick(self, now: float, jobs: Sequence[ReduceJob]) -> None:
        """Look at all links. Called several times a second while jobs run, and once after."""
        current = {(job.transfer, link): job for job in jobs for link in job.links if link != SELF}
        for key in [key for key in self._meters if key not in current]:
            self._over(now, key[1], self._meters.pop(key))
        for key, job in current.items():
            if key[1] in self._links:
                self._measure(now, key, job)

    def _measure(self, now: float, key: tuple[int, int], job: ReduceJob) -> None:
        (sent, _), stats = self._engine.traffic(key[1]), self._engine.stats(key[1])
        meter = self._meters.get(key)
        if meter is None:
            self._meters[key] = _Meter(len(stats), sent, sent)
        else:
            meter.tick(now, sent, stats, self._engine.progress(job.transfer).first_byte_at)

    def _over(self, now: float, number: int, meter: _Meter) -> None:
        link, count = self._links.get(number), self._counts.get(number)
        if link is None or count is None or meter.seconds <= 0:
            return
        before = count.wanted(len(self._links))
        transfer = meter.transfer(link.rtt_min)
        count.measured(transfer, len(self._links), now)
        after = count.wanted(len(self._links))
        if after != before:
            logger.info(
                "peer %s: %d streams carried %.0f Mb/s (round trip %.1f ms, queue %.1f ms), now %d",
                short_id(link.peer_id),
                transfer.streams,
                1e-6 * transfer.goodput_bps,
                1e3 * link.rtt_min,
                1e3 * transfer.queue_s,
                after,
            )
        self._apply(link)
