"""The engine on native threads: `_native.Pump` moves, adds and encodes chunks without the GIL."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from p2pavg import native
from p2pavg.native import compiled
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

MOST_THREADS = 4
_ALL_CHUNKS = 2**32 - 1


def available() -> bool:
    """Whether the native module is built and contains the pump (Linux only)."""
    return native.available() and hasattr(compiled, "Pump")


def can_encrypt() -> bool:
    """Whether the pump can encrypt streams, as this machine has libcrypto."""
    return available() and compiled.can_encrypt()


class PumpEngine:
    """Implements `engine.Engine`. Keeps the native threads' buffers alive until they let go of them."""

    def __init__(self, events: EngineEvents, threads: int | None = None) -> None:
        """Make an engine of the running event loop.

        threads: how many own the streams; None: one per core, at most MOST_THREADS.
        """
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._pump = compiled.Pump(threads or min(MOST_THREADS, len(os.sched_getaffinity(0))))
        self._uids: dict[int, tuple[int, int]] = {}  # by the number of a stream: its link, its number there
        self._alive: dict[int, list[Any]] = {}  # by transfer: buffers that the native threads use
        self._blobs: set[int] = set()  # transfers of open blobs
        self._running: dict[int, ReduceJob] = {}
        self._lent: dict[
            tuple[int, int, int], list[Any]
        ] = {}  # buffers of blob chunks, by link, transfer, chunk
        self._closed = False
        self._handlers = self._make_handlers()
        self._pid = os.getpid()
        self._loop.add_reader(self._pump.event_fd(), self._drain)
        _close_in_children(self)

    # -- streams

    def attach(self, link: int, stream: int, sock: socket.socket, keys: StreamKeys | None = None) -> None:
        sending, receiving = (keys.sending, keys.receiving) if keys else (b"", b"")
        uid = self._pump.attach(link, stream, sock.detach(), sending, receiving)
        self._uids[uid] = (link, stream)

    def detach(self, link: int, stream: int | None = None) -> None:
        if stream is None:
            self._pump.detach_all(link)
            self._lent = {key: data for key, data in self._lent.items() if key[0] != link}
        else:
            self._pump.detach(link, stream)
        self._uids = {
            uid: (of, number)
            for uid, (of, number) in self._uids.items()
            if of != link or (stream is not None and number != stream)
        }

    def streams(self, link: int) -> Sequence[int]:
        return tuple(self._pump.streams(link))

    def repeat(self, link: int, stream: int) -> None:
        self._pump.repeat(link, stream)

    def pace(self, link: int, bytes_per_second: float) -> None:
        self._pump.pace(link, bytes_per_second)

    # -- jobs

    def open_reduce(self, job: ReduceJob) -> None:
        self._pump.open_reduce(
            transfer=job.transfer,
            rank=job.rank,
            links=job.links,
            voters=job.voters,
            parts=[(part.owner, part.start, part.count, part.deputies, part.swaps) for part in job.parts],
            groups=job.plan.groups,
            gathers=job.plan.gathers,
            chunk_elements=job.chunk_elements,
            contribution_codec=job.contribution_codec,
            result_codec=job.result_codec,
            result=_address(job.result, np.uint8),
            result_bytes=job.result.nbytes,
        )
        self._alive[job.transfer] = [job]

    def begin(self, transfer: int, start: Start) -> None:
        alive = self._alive[transfer]
        source, encoded = start.source, start.encoded
        self._pump.begin(
            transfer=transfer,
            weights=start.weights,
            scale=start.scale,
            source=0 if source is None else _address(source, np.float32),
            source_elements=0 if source is None else source.size,
            encoded=0 if encoded is None else _address(encoded, np.uint8),
            encoded_bytes=0 if encoded is None else encoded.nbytes,
            ready=_ALL_CHUNKS if start.ready is None else start.ready,
        )
        self._running[transfer] = alive[0]
        alive.append(start)

    def supply(self, transfer: int, ready: int) -> None:
        self._pump.supply(transfer, ready)

    def cancel(self, transfer: int) -> None:
        self._pump.cancel(transfer)
        self._running.pop(transfer, None)
        self._alive.pop(transfer, None)
        self._blobs.discard(transfer)
        self._lent = {key: data for key, data in self._lent.items() if key[1] != transfer}

    def finish(self, transfer: int) -> None:
        self._running.pop(transfer, None)
        if self._pump.finish(transfer):
            self._alive.pop(transfer, None)

    def running(self) -> Sequence[ReduceJob]:
        return list(self._running.values())

    def progress(self, transfer: int) -> JobProgress:
        return JobProgress(*self._pump.progress(transfer))

    def missing(self, transfer: int, rank: int) -> Missing:
        contributions, results = self._pump.missing(transfer, rank)
        return Missing(tuple(contributions), tuple(results))

    def resend(self, transfer: int, rank: int, missing: Missing) -> None:
        if transfer in self._alive:
            self._pump.resend(transfer, rank, missing.contributions, missing.results)

    # -- blobs

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        place = np.frombuffer(buffer, dtype=np.uint8)
        if not place.flags.writeable:
            raise ValueError("a blob is received into a writable buffer")
        self._pump.open_blob(transfer, place.ctypes.data, place.nbytes, chunk_bytes)
        self._alive[transfer] = [place]
        self._blobs.add(transfer)

    @property
    def receives_blobs(self) -> bool:
        return bool(self._blobs)

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        lent = np.frombuffer(data, dtype=np.uint8)
        self._pump.send_blob(link, transfer, chunk, lent.ctypes.data, lent.nbytes)
        self._lent.setdefault((link, transfer, chunk), []).append(lent)

    # -- measurements

    def stats(self, link: int) -> Sequence[StreamStats]:
        return [StreamStats(*numbers) for numbers in self._pump.stats(link)]

    def traffic(self, link: int) -> tuple[int, int]:
        return self._pump.traffic(link)

    def wire(self, link: int) -> Wire:
        return Wire(*self._pump.wire(link))

    def health(self, link: int) -> LinkHealth:
        return LinkHealth(*self._pump.health(link))

    def cpu_seconds(self) -> float:
        return self._pump.cpu_seconds()

    def spared(self) -> int:
        return self._pump.spared()

    # -- settings

    def set_heartbeat(self, interval_s: float) -> None:
        self._pump.set_heartbeat(interval_s)

    def note_loop(self) -> None:
        self._pump.note_loop()

    def note_trainer(self) -> None:
        self._pump.note_trainer()

    def set_upload_limit(self, bytes_per_second: float | None) -> None:
        self._pump.set_upload_limit(bytes_per_second or 0.0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            self._pump.abandon()
            return
        self._loop.remove_reader(self._pump.event_fd())
        self._pump.close()
        self._alive.clear()
        self._running.clear()
        self._lent.clear()

    # -- events

    def _drain(self) -> None:
        for kind, link, uid, transfer, index, text in self._pump.drain():
            if self._closed:
                return
            self._handlers[kind](link, uid, transfer, index, text)

    def _make_handlers(self) -> list[Callable[[int, int, int, int, str], None]]:
        by_name: dict[str, Callable[[int, int, int, int, str], None]] = {
            "stream_closed": self._stream_closed,
            "job_done": self._job_done,
            "job_refused": self._job_refused,
            "blob_chunk": self._blob_chunk,
            "blob_sent": self._blob_sent,
            "released": self._released,
        }
        return [by_name[name] for name in compiled.PUMP_EVENTS]

    def _stream_closed(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        if uid in self._uids:
            self._events.stream_closed(*self._uids.pop(uid), text)

    def _job_done(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        if transfer in self._alive:
            crcs = self._pump.part_crcs(transfer)
            self._events.job_done(transfer, tuple(hashlib.sha256(part).digest() for part in crcs))

    def _job_refused(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        if transfer in self._alive:
            self._events.job_refused(transfer, index, text)

    def _blob_chunk(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        if transfer in self._alive:
            self._events.blob_chunk(transfer, index)

    def _blob_sent(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        lent = self._lent.get((link, transfer, index))
        if lent is not None:
            lent.pop(0)
            if not lent:
                del self._lent[link, transfer, index]
            self._events.blob_sent(link, transfer, index)

    def _released(self, link: int, uid: int, transfer: int, index: int, text: str) -> None:
        self.cancel(transfer)


def _address(array: np.ndarray[Any, Any], dtype: type[np.generic]) -> int:
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"a contiguous one-dimensional array of {np.dtype(dtype)} is needed")
    return int(array.ctypes.data)


def _close_in_children(engine: PumpEngine) -> None:
    """Close the streams in forked children (DataLoader workers), which must not keep them open."""
    weak = weakref.ref(engine)

    def close() -> None:
        if (alive := weak()) is not None:
            alive.close()

    os.register_at_fork(after_in_child=close)
