"""Repairs transfers while they run: requests lost and stuck chunks again, and replaces stalled streams.

The receiver sends the request, as only the receiver knows the missing chunks. The sender knows whether they
are still on their way, for example over a slow path, and then ignores the request, as a duplicate would make
the path slower still.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p2pavg.errors import ProtocolError
from p2pavg.identity import short_id
from p2pavg.transport.engine import SELF, Engine, Missing, ReduceJob
from p2pavg.transport.links.handshake import MOST_ITEMS
from p2pavg.transport.links.link import Link
from p2pavg.transport.links.stalls import Chunk, LinkWatch, RankWatch, patience

logger = logging.getLogger("p2pavg.transport")

_MOST_CHUNKS = MOST_ITEMS  # the most chunks named in one request; the next request names the rest


class Repairs:
    def __init__(
        self, engine: Engine, links: Mapping[int, Link], replace: Callable[[Link, int], None]
    ) -> None:
        """links: by id, live view. replace(link, stream): close a stalled stream; a new one takes its
        place.
        """
        self._engine = engine
        self._links = links
        self._replace = replace
        self._watches: dict[int, LinkWatch] = {}
        self._ranks: dict[tuple[int, int], RankWatch] = {}

    def tick(self, now: float, jobs: Sequence[ReduceJob]) -> None:
        """Check all links and jobs. Called several times a second while jobs run, else once a second."""
        for number in [number for number in self._watches if number not in self._links]:
            del self._watches[number]
        for link in list(self._links.values()):
            self._look_at(link, now)
        current = {(job.transfer, rank) for job in jobs for rank in range(len(job.links))}
        for key in [key for key in self._ranks if key not in current]:
            del self._ranks[key]
        for job in jobs:
            for rank, number in enumerate(job.links):
                link_or_none = self._links.get(number)
                if number != SELF and link_or_none is not None:
                    self._ask(job, rank, link_or_none, now)

    def _look_at(self, link: Link, now: float) -> None:
        watch = self._watches.setdefault(link.id, LinkWatch())
        watch.tick(now, self._engine.stats(link.id))
        for stream in watch.stalled(now, link.rtt_min, link.last_heard):
            logger.info("stream %d to peer %s is stalled: opening another", stream, short_id(link.peer_id))
            self._replace(link, stream)
        for stream in watch.late(now, link.rtt_min):
            self._engine.repeat(link.id, stream)

    def _ask(self, job: ReduceJob, rank: int, link: Link, now: float) -> None:
        watch, streams = self._ranks.setdefault((job.transfer, rank), RankWatch(now)), self._watches[link.id]
        progress = self._engine.progress(job.transfer)
        watch.contributions.tick(now, progress.contributions_received[rank])
        watch.results.tick(now, progress.results_received[rank])
        if not watch.suspicious(now, link.rtt_min, streams):
            return
        missing = self._engine.missing(job.transfer, rank)
        wanted = watch.ask(now, link.rtt_min, streams, job, rank, missing)
        if wanted.contributions or wanted.results:
            link.send(
                {
                    "t": "_resend",
                    "transfer": job.transfer,
                    "contributions": wanted.contributions[:_MOST_CHUNKS],
                    "results": wanted.results[:_MOST_CHUNKS],
                }
            )

    def asked(self, link: Link, message: Mapping[str, Any]) -> None:
        """Send again the chunks that the other side lacks. Raises ProtocolError when the request is
        malformed.
        """
        contributions, results = _chunks(message.get("contributions")), _chunks(message.get("results"))
        watch, now, wait = self._watches.get(link.id), time.monotonic(), patience(link.rtt_min)
        if watch is not None and watch.moving(now, link.rtt_min):
            return  # the chunks are on their way, and duplicates would delay them
        for job in self._engine.running():
            if job.transfer == message.get("transfer") and link.id in job.links:
                rank = job.links.index(link.id)
                told = self._ranks.setdefault((job.transfer, rank), RankWatch(now))
                again = Missing(
                    told.contributions_again.choose(now, wait, _of(job, contributions)),
                    told.results_again.choose(now, wait, _of(job, results)),
                )
                logger.debug("sending %d chunks again", len(again.contributions) + len(again.results))
                self._engine.resend(job.transfer, rank, again)


def _chunks(value: object) -> list[Chunk]:
    if not isinstance(value, list) or len(value) > _MOST_CHUNKS:
        raise ProtocolError("a malformed request to send again")
    chunks = []
    for pair in value:
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(number) is int and 0 <= number < 2**32 for number in pair)
        ):
            raise ProtocolError("a malformed request to send again")
        chunks.append((pair[0], pair[1]))
    return chunks


def _of(job: ReduceJob, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The requested chunks that the job has, so that a request cannot make this side remember others."""
    return [
        (part, index)
        for part, index in chunks
        if part < len(job.parts) and index * job.chunk_elements < job.parts[part].count
    ]
