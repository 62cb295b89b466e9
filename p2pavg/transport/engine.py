"""The interface of an engine, which moves chunks over data streams and reduces them.

Two implementations speak the same wire format and pass the same tests: `python_engine.PythonEngine` on the
event loop, and `pump_engine.PumpEngine` on native threads that never hold the GIL. Everything here is called
on the event-loop thread, and every event is delivered there.

Roles in a reduce job. Ranks 0..N-1 are the members. Each part of the vector has a tree of them (see
`p2pavg.plan`): an owner, perhaps deputies, and the others. A member with weight > 0 sends every chunk of
every part to its parent (CONTRIBUTION); who has children adds `weight * decode(chunk)` in float32 (its own
contribution without a detour over the codec, unless its source is already encoded). When the contributions of
all children with weight > 0 are in, a deputy divides by their weights and its own, encodes that once with the
result codec and sends it to its parent (CONTRIBUTION too). The owner divides by the total weight, encodes
once with the result codec, stores the encoded bytes in its own result buffer and sends exactly these bytes to
its children (RESULT), and deputies pass them on to theirs. Where owner and deputy swap, each sends the other
that encoded mean (CONTRIBUTION), and both decode the two, add them up, the owner's first, divide by the total
weight, encode, and send the same bytes to their own children. A member with weight 0 sends no contribution,
but serves the parts it owns or is a deputy for, and receives results. In an all-gather nobody sends
CONTRIBUTIONs: the RESULT of a part is what its owner contributes, in a sparse codec; the parts of members
with weight 0 are zeros, which nobody sends; and what is malformed is refused. Members that do not vote
(joiners) have no children, receive results, and nobody's completion waits for them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.report.wire import Wire

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SELF = -1  # the link id of this peer itself
NOBODY = -2  # the link id of a member with which this peer exchanges nothing


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """AES-256 keys of one data stream, 32 bytes each; used for nothing else."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReduceJob:
    """One attempt to average one float32 vector, as far as it is known when this peer promises to take part.

    Encoded layout (of `result` and of `encoded`): parts in order, chunks of `chunk_elements` in order (the
    last chunk of a part may be shorter), each `codec.encoded_size(elements)` bytes, without gaps.
    """

    transfer: int  # unique 64-bit id of the attempt, chosen by the leader
    rank: int  # this peer's rank
    links: tuple[int, ...]  # link id of each rank; SELF at `rank`; NOBODY between two that own nothing
    voters: tuple[bool, ...]  # False: a joiner
    plan: Plan  # owners and deputies are voters
    chunk_elements: int
    contribution_codec: int  # codecs.Codec.wire_id
    result_codec: int
    result: U8  # filled with the encoded result

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the plan."""
        return self.plan.parts


@dataclass(frozen=True, slots=True)
class Start:
    """The facts that BEGIN brings: who contributes with which weight."""

    weights: tuple[float, ...]  # per rank, >= 0, at least one > 0
    scale: float  # factor that makes a local mean of this peer's raw source
    # This peer's contribution, as float32[numel] or as uint8 in the encoded layout of contribution_codec, in
    # an all-gather of its own part; both None when its weight is 0. It must not change before the job has
    # ended.
    source: F32 | None = None  # raw: the engine sends encode(source * scale)
    encoded: U8 | None = None  # or already encoded (scale is not applied)
    ready: int | None = (
        None  # chunks of `encoded` that are in place, in layout order; None: all. See `supply`
    )


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far the exchange with each member is, by rank. Counts of chunks, which never fall."""

    contributions_received: tuple[int, ...]  # chunks that I reduce, from this child
    results_received: tuple[int, ...]  # result chunks that this rank, as my parent, has sent to me
    contributions_sent: tuple[int, ...]  # my chunks handed to the kernel for this parent
    results_sent: tuple[int, ...]
    first_byte_at: float  # time.monotonic() of the first gradient byte sent or received; 0.0 before
    last_byte_at: float


@dataclass(frozen=True, slots=True)
class Missing:
    """Chunks that one rank has yet to send, for a request to send them again."""

    contributions: tuple[tuple[int, int], ...]  # (part, chunk) of parts in which that rank is my child
    results: tuple[tuple[int, int], ...]  # (part, chunk) of parts in which it is my parent


@dataclass(frozen=True, slots=True)
class StreamStats:
    """One TCP connection, by TCP_INFO and the engine's own counters."""

    stream: int
    bytes_sent: int  # frame bytes handed to the kernel, headers included
    bytes_received: int
    rtt_s: float  # smoothed by the kernel; 0.0 when unknown
    window_bytes: int  # snd_cwnd * mss
    delivery_rate_bps: float  # bit/s, tcpi_delivery_rate
    unacked_bytes: int  # sent and not acknowledged: SIOCOUTQ less the unsent bytes
    last_received_at: float  # time.monotonic(), 0.0 = never
    retransmits: int = 0
    unsent_bytes: int = 0  # handed to the kernel and not sent yet, as window or path are full
    # In the kernel of this side: arrived, but not read, as the engine is busy or awaits the rest of a chunk.
    unread_bytes: int = 0

    @property
    def arrived_bytes(self) -> int:
        """Bytes that have come so far, whether they are read or not."""
        return self.bytes_received + self.unread_bytes

    @property
    def acked_bytes(self) -> int:
        """Bytes sent that the other side's kernel has acknowledged. Too low, at first below 0, while bytes
        are under way that `bytes_sent` leaves out.
        """
        return self.bytes_sent - self.unacked_bytes - self.unsent_bytes


@dataclass(frozen=True, slots=True)
class LinkHealth:
    """The state of the other side, by its heartbeats. Times are seconds of this machine's monotonic clock."""

    last_heard_at: float  # when any frame or heartbeat came last
    rtt_s: float  # round trip of a PING frame; 0.0 when unknown
    loop_age_s: float  # at its last heartbeat: seconds since its event loop turned
    trainer_age_s: float  # at its last heartbeat: seconds since its training thread called step()


class EngineEvents(Protocol):
    """Takes the reports of an engine. Called on the event-loop thread; must not raise, and must be quick."""

    def stream_closed(self, link: int, stream: int, reason: str) -> None: ...

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        """All results are in `result`, and all chunks that voters need from this peer are with the kernel.

        digests: per part, sha256 over the little-endian CRC-32s of its encoded chunks, in order.
        """

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        """A member contributed something that cannot be used (non-finite, wrong size, not a contributor)."""

    def blob_chunk(self, transfer: int, chunk: int) -> None:
        """A chunk of an open blob arrived, passed its checksum, and is in place."""

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None:
        """A chunk given to `send_blob` was handed to the kernel; its buffer is free again."""


class Engine(Protocol):
    """Moves chunks. All methods are called on the loop thread and return at once.

    Contributions to a job that was opened but has not begun, and results that a deputy passes on, are held
    back (the stream is not read further) until `begin` or `cancel`. Frames of unknown transfers are read and
    dropped. A duplicate chunk is dropped. A frame that breaks the format, or whose checksum is wrong, closes
    its stream with a reason.
    """

    def attach(self, link: int, stream: int, sock: socket.socket, keys: StreamKeys | None = None) -> None:
        """Take over a connected, handshaken, non-blocking TCP socket as a data stream of `link`; with `keys`,
        an encrypted one.
        """

    def detach(self, link: int, stream: int | None = None) -> None:
        """Close one stream, or all streams of the link. No event follows. Idempotent."""

    def streams(self, link: int) -> Sequence[int]: ...

    def repeat(self, link: int, stream: int) -> None:
        """Send chunks that were handed to this stream, and that the other side's kernel has not acknowledged,
        over other streams too; each one once.
        """

    def pace(self, link: int, bytes_per_second: float) -> None:
        """Each stream that the link has now sends at most so much, and holds little more than it can send
        soon. math.inf: no limit.
        """

    def open_reduce(self, job: ReduceJob) -> None: ...

    def begin(self, transfer: int, start: Start) -> None: ...

    def supply(self, transfer: int, ready: int) -> None:
        """The first `ready` chunks of `Start.encoded` are in place now: they may go out, and be added to."""

    def cancel(self, transfer: int) -> None:
        """Forget a job or blob, at once: buffers are not touched any more after this returns. Idempotent."""

    def running(self) -> Sequence[ReduceJob]:
        """The transfers of jobs that have begun and were neither cancelled nor finished."""

    def progress(self, transfer: int) -> JobProgress: ...

    def missing(self, transfer: int, rank: int) -> Missing: ...

    def resend(self, transfer: int, rank: int, missing: Missing) -> None:
        """Send again the chunks that `rank` misses; chunks that are not ready yet are sent when they are."""

    def finish(self, transfer: int) -> None:
        """The job is over for everybody (COMMIT): release it. Results on their way to joiners go on, from
        `result`, which stays unchanged until they are gone or `cancel`."""

    def open_blob(self, transfer: int, buffer: memoryview, chunk_bytes: int) -> None:
        """Receive BLOB chunks: chunk i goes to buffer[i*chunk_bytes:], the last may be shorter."""

    @property
    def receives_blobs(self) -> bool:
        """Whether a blob is open, so that chunks may be on their way on any stream."""

    def send_blob(self, link: int, transfer: int, chunk: int, data: memoryview) -> None:
        """Queue one blob chunk (after all gradient chunks of that link)."""

    def stats(self, link: int) -> Sequence[StreamStats]: ...

    def traffic(self, link: int) -> tuple[int, int]:
        """(sent, received) frame bytes over all streams that the link ever had, until `detach(link)`."""

    def wire(self, link: int) -> Wire:
        """IP bytes of all connections that the link ever had as streams, their openings included, until
        `detach(link)`. Bytes of frames where the kernel does not tell.
        """

    def health(self, link: int) -> LinkHealth: ...

    def set_heartbeat(self, interval_s: float) -> None:
        """Send a PING on every link each interval, from a native thread where there is one. The other side
        answers one each second, and each while it sends none itself.
        """

    def note_loop(self) -> None:
        """Note that the event loop turns. A timer calls this."""

    def note_trainer(self) -> None:
        """Note that the training thread called step(). May be called from any thread."""

    def set_upload_limit(self, bytes_per_second: float | None) -> None: ...

    def spared(self) -> int:
        """Bytes of chunks that were not sent, because the chunks went as LZ4 blocks."""

    def cpu_seconds(self) -> float:
        """CPU time of the engine's own threads so far (0.0 for the Python twin, which works on the loop
        thread).
        """

    def close(self) -> None:
        """Stop threads, close streams, without events. Idempotent. Also called in forked children (fds
        only).
        """


class NoEvents:
    """Listens to an engine without data streams, which has nothing to tell."""

    def stream_closed(self, link: int, stream: int, reason: str) -> None: ...

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None: ...

    def job_refused(self, transfer: int, rank: int, why: str) -> None: ...

    def blob_chunk(self, transfer: int, chunk: int) -> None: ...

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None: ...
