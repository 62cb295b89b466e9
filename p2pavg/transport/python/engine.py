"""The engine in Python, on the event loop: what runs without a compiler, and the native pump's twin."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from p2pavg import codecs
from p2pavg.forkguard import guard
from p2pavg.transport.engine import (
    Begin,
    EngineEvents,
    JobProgress,
    LinkHealth,
    Missing,
    ReduceJob,
    StreamKeys,
    StreamStats,
)
from p2pavg.transport.frames import Header, Heartbeat, Kind
from p2pavg.transport.pacing import TokenBucket
from p2pavg.transport.python import sending
from p2pavg.transport.python.blobs import Blob
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.heartbeat import HeartbeatLanding, OwnPulse
from p2pavg.transport.python.job import ReduceRun
from p2pavg.transport.python.link import PeerStreams
from p2pavg.transport.python.outbox import Class, Item
from p2pavg.transport.python.reducer import NonFiniteError, Reducer
from p2pavg.transport.python.stream import DataStream, Fate, Landing


class PythonEngine:
    """Implements `engine.Engine`."""

    def __init__(self, events: EngineEvents, extra_codecs: Sequence[codecs.Codec] = ()) -> None:
        """Belongs to the running event loop. extra_codecs: what jobs may name besides the built-in ones."""
        self._loop = asyncio.get_running_loop()
        self._events = events
        built_in = [codecs.get(name) for name in codecs.WIRE_IDS]
        self._codecs = {codec.wire_id: codec for codec in (*built_in, *extra_codecs)}
        self._pool = BufferPool()
        self._links: dict[int, PeerStreams] = {}
        self._runs: dict[int, ReduceRun] = {}
        self._blobs: dict[int, Blob] = {}
        self._own = OwnPulse()
        self._heartbeat_s = 0.0
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._bucket: TokenBucket | None = None
        self._limit_timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()
        self._closed = False

    # -- streams

    def attach(self, link: int, stream: int, sock: socket.socket, keys: StreamKeys | None = None) -> None:
        peer = self._peer(link)
        if stream in peer.open:
            raise ValueError(f"link {link} has a stream {stream} already")
        peer.open[stream] = DataStream(self._loop, link, stream, guard(sock), self, keys)
        peer.kick()

    def detach(self, link: int, stream: int | None = None) -> None:
        peer = self._links.get(link)
        if peer is None:
            return
        for data_stream in list(peer.open.values()):
            if stream is None or data_stream.number == stream:
                data_stream.close()
                self._retire(peer, data_stream)
        if stream is None:
            del self._links[link]

    def streams(self, link: int) -> Sequence[int]:
        peer = self._links.get(link)
        return tuple(peer.open) if peer else ()

    def repeat(self, link: int, stream: int) -> None:
        peer = self._links.get(link)
        late = peer.open.get(stream) if peer else None
        if peer is None or late is None or self._bucket is not None:
            return  # under an upload limit bytes cost more than time
        for item in late.unacknowledged():
            peer.outbox.put_back(replace(item, repeat=True, not_over=stream, scratch=None))
        peer.kick()

    def pace(self, link: int, bytes_per_second: float) -> None:
        peer = self._links.get(link)
        for stream in peer.open.values() if peer else ():
            stream.pace(bytes_per_second)

    def _peer(self, link: int) -> PeerStreams:
        return self._links.setdefault(link, PeerStreams())

    def _all_streams(self) -> Iterator[DataStream]:
        for peer in list(self._links.values()):
            yield from list(peer.open.values())

    def _retire(self, peer: PeerStreams, stream: DataStream) -> None:
        """A closed stream: what it had not wholly sent goes to the others."""
        peer.retire(stream)
        item, stream.item = stream.item, None
        if item is not None:
            sending.release(item, self._pool)
            if not item.stale and not stream.told(item):
                item.repeat = True
                peer.outbox.put_back(item)
        peer.kick()

    def broken(self, stream: DataStream, reason: str) -> None:
        self._retire(self._links[stream.link], stream)
        self._events.stream_closed(stream.link, stream.number, reason)

    # -- reduce jobs

    def open_reduce(self, job: ReduceJob) -> None:
        if job.transfer in self._runs:
            raise ValueError(f"transfer {job.transfer} is open already")
        contribution, result = self._codecs[job.contribution_codec], self._codecs[job.result_codec]
        reducer = Reducer(job, contribution, result, self._codecs[codecs.WIRE_IDS["none"]], self._pool)
        self._runs[job.transfer] = ReduceRun(self._loop, self._events, self._pool, reducer, self._put)

    def _put(self, link: int, items: Sequence[Item]) -> None:
        peer = self._peer(link)
        for item in items:
            peer.outbox.put(item)
        peer.kick()

    def begin(self, transfer: int, begin: Begin) -> None:
        self._runs[transfer].begin(begin)

    def supply(self, transfer: int, ready: int) -> None:
        self._runs[transfer].supply(ready)

    def cancel(self, transfer: int) -> None:
        self._blobs.pop(transfer, None)
        self._forget(transfer, keep=None)

    def finish(self, transfer: int) -> None:
        self._forget(transfer, keep=Class.JOINER)

    def _forget(self, transfer: int, keep: Class | None) -> None:
        def over(item: Item) -> bool:
            return item.transfer == transfer and item.order not in (Class.HEARTBEAT, keep)

        run = self._runs.pop(transfer, None)
        for peer in self._links.values():
            peer.outbox.drop(over)
        for stream in self._all_streams():
            stream.forget_handed(over)
            if stream.receiving == transfer:
                stream.forget_landing()
            if stream.item is not None and over(stream.item):
                stream.item.stale = True
                stream.keep_own_copy()
        if run is not None:
            run.end()

    def running(self) -> Sequence[ReduceJob]:
        return [run.job for run in self._runs.values() if run.begun]

    def progress(self, transfer: int) -> JobProgress:
        return self._runs[transfer].progress()

    def missing(self, transfer: int, rank: int) -> Missing:
        return self._runs[transfer].missing(rank)

    def resend(self, transfer: int, rank: int, missing: Missing) -> None:
        run = self._runs.get(transfer)
        if run is not None:
            run.resend(rank, missing)

    # -- blobs

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        if transfer in self._blobs:
            raise ValueError(f"transfer {transfer} is open already")
        self._blobs[transfer] = Blob(
            self._pool, buffer, chunk_bytes, lambda chunk: self._events.blob_chunk(transfer, chunk)
        )

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        self._put(link, [Item(Class.BLOB, Kind.BLOB, transfer, number=chunk, data=data.cast("B"))])

    # -- what streams ask

    def place(self, stream: DataStream, header: Header) -> Landing | Fate:
        if header.kind is Kind.PING or header.kind is Kind.PONG:
            return HeartbeatLanding(header.kind, lambda kind, beat: self._heard(stream.link, kind, beat))
        if header.kind is Kind.BLOB:
            blob = self._blobs.get(header.transfer)
            return blob.expect(stream, header) if blob else Fate.DROP
        run = self._runs.get(header.transfer)
        return run.expect(stream, header) if run else Fate.DROP

    def next_frame(self, stream: DataStream) -> tuple[Item, bytes, memoryview] | None:
        outbox = self._links[stream.link].outbox
        wait = self._bucket.wait_s(time.monotonic()) if self._bucket else 0.0
        if wait and outbox and self._limit_timer is None:
            self._limit_timer = self._loop.call_later(wait, self._limit_over)
        while (item := outbox.take(stream.number, chunks=not wait)) is not None:
            run = self._runs.get(item.transfer)
            try:
                head, body = sending.frame(item, self._pool)
            except NonFiniteError as error:
                sending.release(item, self._pool)
                if run is not None:
                    run.refuse(error.rank, str(error))
                continue
            if item.job is not None and run is not None:
                run.leaving()
            if self._bucket is not None:
                self._bucket.spend(len(head) + len(body))
            return item, head, body
        return None

    def handed(self, stream: DataStream, item: Item) -> None:
        sending.release(item, self._pool)
        if item.stale:
            return
        if item.kind is Kind.BLOB:
            self._events.blob_sent(stream.link, item.transfer, item.number)
        elif item.job is not None:
            run = self._runs.get(item.transfer)
            if run is not None and run.reducer is item.job:
                run.handed(item)

    # -- upload limit

    def set_upload_limit(self, bytes_per_second: float | None) -> None:
        self._bucket = TokenBucket(bytes_per_second, time.monotonic()) if bytes_per_second else None
        self._limit_over()

    def _limit_over(self) -> None:
        if self._limit_timer is not None:
            self._limit_timer.cancel()
            self._limit_timer = None
        for peer in self._links.values():
            peer.kick()

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
        for peer in self._links.values():
            if peer.open:
                self._put_beat(peer, Kind.PING, time.monotonic_ns())

    def _put_beat(self, peer: PeerStreams, kind: Kind, stamp: int) -> None:
        peer.outbox.put(Item(Class.HEARTBEAT, kind, data=self._own.beat(stamp)))
        peer.kick()

    def _heard(self, link: int, kind: Kind, beat: Heartbeat) -> None:
        peer = self._links.get(link)
        if peer is not None:
            peer.pulse.heard(beat, kind)
            if kind is Kind.PING:
                self._put_beat(peer, Kind.PONG, beat.stamp)

    def note_loop(self) -> None:
        self._own.loop_at = time.monotonic()

    def note_trainer(self) -> None:
        self._own.trainer_at = time.monotonic()

    # -- numbers

    def stats(self, link: int) -> Sequence[StreamStats]:
        peer = self._links.get(link)
        return peer.stats() if peer else ()

    def traffic(self, link: int) -> tuple[int, int]:
        peer = self._links.get(link)
        return peer.traffic() if peer else (0, 0)

    def health(self, link: int) -> LinkHealth:
        return (self._links.get(link) or PeerStreams()).health()

    def cpu_seconds(self) -> float:
        return 0.0

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
        for run in self._runs.values():
            run.end()
        self._runs.clear()
        self._blobs.clear()
        self._links.clear()
        for stream in streams:
            stream.close()
