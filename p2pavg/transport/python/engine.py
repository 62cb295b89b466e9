"""The engine in Python, on the event loop. It needs no compiler, and is the native pump's twin."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from p2pavg import codecs
from p2pavg.forkguard import guard
from p2pavg.report.wire import Wire
from p2pavg.transport.engine import (
    EngineEvents,
    JobProgress,
    LinkHealth,
    Missing,
    ReduceJob,
    Start,
    StreamKeys,
    StreamStats,
)
from p2pavg.transport.frames import NO_ANSWER, Header, Heartbeat, Kind
from p2pavg.transport.limiter import Limiter
from p2pavg.transport.python import sending
from p2pavg.transport.python.blob import Blob
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.heartbeat import HeartbeatBuffer, OwnActivity
from p2pavg.transport.python.job import Job
from p2pavg.transport.python.link import Link
from p2pavg.transport.python.outbox import Item, Priority
from p2pavg.transport.python.reducer import NonFiniteError, Reducer
from p2pavg.transport.python.stream import Destination, Fate, Stream


class PythonEngine:
    """Implements `engine.Engine`."""

    def __init__(self, events: EngineEvents, extra_codecs: Sequence[codecs.Codec] = ()) -> None:
        """Make an engine of the running event loop. extra_codecs: for jobs, beside the built-in codecs."""
        self._loop = asyncio.get_running_loop()
        self._events = events
        built_in = [codecs.get(name) for name in (*codecs.WIRE_IDS, *codecs.SPARSE_IDS)]
        self._codecs = {codec.wire_id: codec for codec in (*built_in, *extra_codecs)}
        self._pool = BufferPool()
        self._links: dict[int, Link] = {}
        self._jobs: dict[int, Job] = {}
        self._blobs: dict[int, Blob] = {}
        self._spared = 0  # bytes of chunks that were not sent, as the chunks were packed
        self._own = OwnActivity()
        self._heartbeat_s = 0.0
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._limiter: Limiter | None = None
        self._limit_timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()
        self._closed = False

    # -- streams

    def attach(self, link: int, stream: int, sock: socket.socket, keys: StreamKeys | None = None) -> None:
        known = self._link(link)
        if stream in known.open:
            raise ValueError(f"link {link} has a stream {stream} already")
        known.open[stream] = Stream(self._loop, link, stream, guard(sock), self, keys)
        known.kick()

    def detach(self, link: int, stream: int | None = None) -> None:
        known = self._links.get(link)
        if known is None:
            return
        for open_stream in list(known.open.values()):
            if stream is None or open_stream.number == stream:
                open_stream.close()
                self._retire(known, open_stream)
        if stream is None:
            del self._links[link]

    def streams(self, link: int) -> Sequence[int]:
        known = self._links.get(link)
        return tuple(known.open) if known else ()

    def repeat(self, link: int, stream: int) -> None:
        known = self._links.get(link)
        late = known.open.get(stream) if known else None
        if known is None or late is None or self._limiter is not None:
            return  # under an upload limit bytes cost more than time
        for item in late.unacknowledged():
            known.outbox.put_back(replace(item, repeat=True, not_over=stream, scratch=None))
        known.kick()

    def pace(self, link: int, bytes_per_second: float) -> None:
        known = self._links.get(link)
        for stream in known.open.values() if known else ():
            stream.pace(bytes_per_second)

    def _link(self, link: int) -> Link:
        return self._links.setdefault(link, Link())

    def _all_streams(self) -> Iterator[Stream]:
        for known in list(self._links.values()):
            yield from list(known.open.values())

    def _retire(self, known: Link, stream: Stream) -> None:
        """Take leave of a closed stream; the others send the frames that it had not wholly sent."""
        known.retire(stream)
        item, stream.item = stream.item, None
        if item is not None:
            sending.release(item, self._pool)
            if not item.stale and not stream.told(item):
                item.repeat = True
                known.outbox.put_back(item)
        known.kick()

    def broken(self, stream: Stream, reason: str) -> None:
        self._retire(self._links[stream.link], stream)
        self._events.stream_closed(stream.link, stream.number, reason)

    # -- reduce jobs

    def open_reduce(self, job: ReduceJob) -> None:
        if job.transfer in self._jobs:
            raise ValueError(f"transfer {job.transfer} is open already")
        contribution, result = self._codecs[job.contribution_codec], self._codecs[job.result_codec]
        reducer = Reducer(job, contribution, result, self._codecs[codecs.WIRE_IDS["none"]], self._pool)
        self._jobs[job.transfer] = Job(self._loop, self._events, self._pool, reducer, self._put)

    def _put(self, link: int, items: Sequence[Item]) -> None:
        known = self._link(link)
        for item in items:
            known.outbox.put(item)
        known.kick()

    def begin(self, transfer: int, start: Start) -> None:
        self._jobs[transfer].begin(start)

    def supply(self, transfer: int, ready: int) -> None:
        self._jobs[transfer].supply(ready)

    def cancel(self, transfer: int) -> None:
        self._blobs.pop(transfer, None)
        self._forget(transfer, keep=None)

    def finish(self, transfer: int) -> None:
        self._forget(transfer, keep=Priority.JOINER)

    def _forget(self, transfer: int, keep: Priority | None) -> None:
        def over(item: Item) -> bool:
            return item.transfer == transfer and item.priority not in (Priority.HEARTBEAT, keep)

        job = self._jobs.pop(transfer, None)
        for known in self._links.values():
            known.outbox.drop(over)
        for stream in self._all_streams():
            stream.forget_handed(over)
            if stream.receiving == transfer:
                stream.forget_destination()
            if stream.item is not None and over(stream.item):
                stream.item.stale = True
                stream.keep_own_copy()
        if job is not None:
            job.end()

    def running(self) -> Sequence[ReduceJob]:
        return [job.spec for job in self._jobs.values() if job.begun]

    def progress(self, transfer: int) -> JobProgress:
        return self._jobs[transfer].progress()

    def missing(self, transfer: int, rank: int) -> Missing:
        return self._jobs[transfer].missing(rank)

    def resend(self, transfer: int, rank: int, missing: Missing) -> None:
        job = self._jobs.get(transfer)
        if job is not None:
            job.resend(rank, missing)

    # -- blobs

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        if transfer in self._blobs:
            raise ValueError(f"transfer {transfer} is open already")
        self._blobs[transfer] = Blob(
            self._pool, buffer, chunk_bytes, lambda chunk: self._events.blob_chunk(transfer, chunk)
        )

    @property
    def receives_blobs(self) -> bool:
        return bool(self._blobs)

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        self._put(link, [Item(Priority.BLOB, Kind.BLOB, transfer, number=chunk, data=data.cast("B"))])

    # -- what streams ask

    def route(self, stream: Stream, header: Header) -> Destination | Fate:
        if header.kind is Kind.PING or header.kind is Kind.PONG:
            return HeartbeatBuffer(header.kind, lambda kind, beat: self._heard(stream.link, kind, beat))
        if header.kind is Kind.BLOB:
            blob = self._blobs.get(header.transfer)
            return blob.expect(stream, header) if blob else Fate.DROP
        job = self._jobs.get(header.transfer)
        return job.expect(stream, header) if job else Fate.DROP

    def next_frame(self, stream: Stream) -> tuple[Item, bytes, memoryview] | None:
        outbox = self._links[stream.link].outbox
        wait = self._limiter.wait_s(time.monotonic()) if self._limiter else 0.0
        if wait and outbox and self._limit_timer is None:
            self._limit_timer = self._loop.call_later(wait, self._limit_over)
        while (item := outbox.take(stream.number, chunks=not wait)) is not None:
            job = self._jobs.get(item.transfer)
            try:
                head, body, spared = sending.frame(item, self._pool, lambda: self._rate(stream))
            except NonFiniteError as error:
                sending.release(item, self._pool)
                if job is not None:
                    job.refuse(error.rank, str(error))
                continue
            if item.reducer is not None and job is not None:
                job.leaving()
            self._spared += spared
            if self._limiter is not None:
                self._limiter.spend(len(head) + len(body))
            return item, head, body
        return None

    def _rate(self, stream: Stream) -> float:
        """Bytes/s of the stream's link, if all its streams carry as much; 0 when it is limited or unknown."""
        if self._limiter is not None:
            return 0.0
        return stream.delivery_rate() / 8 * len(self._links[stream.link].open)

    def handed(self, stream: Stream, item: Item) -> None:
        sending.release(item, self._pool)
        if item.stale:
            return
        if item.kind is Kind.BLOB:
            self._events.blob_sent(stream.link, item.transfer, item.number)
        elif item.reducer is not None:
            job = self._jobs.get(item.transfer)
            if job is not None and job.reducer is item.reducer:
                job.handed(item)

    # -- upload limit

    def set_upload_limit(self, bytes_per_second: float | None) -> None:
        self._limiter = Limiter(bytes_per_second, time.monotonic()) if bytes_per_second else None
        self._limit_over()

    def _limit_over(self) -> None:
        if self._limit_timer is not None:
            self._limit_timer.cancel()
            self._limit_timer = None
        for known in self._links.values():
            known.kick()

    # -- heartbeats

    def set_heartbeat(self, interval_s: float) -> None:
        self._heartbeat_s = interval_s
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None
        if interval_s > 0:
            self._beat()

    def _beat(self) -> None:
        self._heartbeat_timer = self._loop.call_later(self._heartbeat_s, self._beat)
        for known in self._links.values():
            if known.open:
                unsent = known.outbox.heartbeat(Kind.PING)
                asks = unsent is not None and Heartbeat.parse(unsent.data).stamp != NO_ANSWER
                self._put_beat(known, Kind.PING, known.activity.stamp(asks))

    def _put_beat(self, known: Link, kind: Kind, stamp: int) -> None:
        known.outbox.put(Item(Priority.HEARTBEAT, kind, data=self._own.beat(stamp)))
        known.kick()

    def _heard(self, link: int, kind: Kind, beat: Heartbeat) -> None:
        known = self._links.get(link)
        if known is not None:
            known.activity.heard(beat, kind)
            if kind is Kind.PING and beat.stamp != NO_ANSWER:
                self._put_beat(known, Kind.PONG, beat.stamp)

    def note_loop(self) -> None:
        self._own.loop_at = time.monotonic()

    def note_trainer(self) -> None:
        self._own.trainer_at = time.monotonic()

    # -- numbers

    def stats(self, link: int) -> Sequence[StreamStats]:
        known = self._links.get(link)
        return known.stats() if known else ()

    def traffic(self, link: int) -> tuple[int, int]:
        known = self._links.get(link)
        return known.traffic() if known else (0, 0)

    def wire(self, link: int) -> Wire:
        peer = self._links.get(link)
        return peer.wire() if peer else Wire()

    def health(self, link: int) -> LinkHealth:
        return (self._links.get(link) or Link()).health()

    def cpu_seconds(self) -> float:
        return 0.0

    def spared(self) -> int:
        return self._spared

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        streams = list(self._all_streams())
        if os.getpid() != self._pid:  # a forked child: the loop and its epoll set are the parent's
            for stream in streams:
                os.close(stream.sock.detach())
            return
        for timer in (self._heartbeat_timer, self._limit_timer):
            if timer is not None:
                timer.cancel()
        for job in self._jobs.values():
            job.end()
        self._jobs.clear()
        self._blobs.clear()
        self._links.clear()
        for stream in streams:
            stream.close()
