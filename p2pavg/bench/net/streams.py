"""Bundles of TCP streams for `bench net`: threads that send, threads that receive and count."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

CHUNK = 1 << 17
CHUNKS_AT_ONCE = 10
_POLL_MS = 50
_RECEIVE = 1 << 18
SAMPLE_S = 0.02
# Offsets in struct tcp_info of include/uapi/linux/tcp.h.
_MSS, _UNACKED, _RTT, _TOTAL_RETRANS, _SEGS_OUT, _NOTSENT, _MIN_RTT = 16, 24, 68, 100, 136, 144, 148
_BUSY, _RWND_LIMITED, _DELIVERED = 168, 176, 192
_INFO_BYTES = 256


@dataclass(frozen=True)
class StreamInfo:
    """The kernel's figures of one stream. Times in seconds; 0 where the kernel has no figure."""

    rtt_s: float
    min_rtt_s: float
    segments: int
    retransmits: int
    busy_s: float  # seconds in which there was data to send
    rwnd_limited_s: float  # seconds of those in which the receiver's window was full
    in_flight_bytes: int
    unsent_bytes: int  # written by the program, not sent yet
    delivered_bytes: int  # received by the other kernel, including bytes that wait there for lost ones


def stream_info(sock: socket.socket) -> StreamInfo:
    """TCP_INFO of a socket; all zero where there is none."""
    raw = b""
    with contextlib.suppress(OSError, AttributeError):
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    raw = raw.ljust(_INFO_BYTES, b"\0")

    def u32(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    def seconds(offset: int) -> float:
        return float(struct.unpack_from("=Q", raw, offset)[0]) * 1e-6

    unknown = 0xFFFFFFFF  # the value of min_rtt before the first sample
    return StreamInfo(
        rtt_s=u32(_RTT) * 1e-6,
        min_rtt_s=0.0 if u32(_MIN_RTT) == unknown else u32(_MIN_RTT) * 1e-6,
        segments=u32(_SEGS_OUT),
        retransmits=u32(_TOTAL_RETRANS),
        busy_s=seconds(_BUSY),
        rwnd_limited_s=seconds(_RWND_LIMITED),
        in_flight_bytes=u32(_UNACKED) * u32(_MSS),
        unsent_bytes=u32(_NOTSENT),
        delivered_bytes=u32(_DELIVERED) * u32(_MSS),
    )


class SendBudget:
    """A budget of bytes to send, shared by threads."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return self._left

    def take(self, count: int) -> int:
        """Reserve up to `count` bytes; returns how many were reserved, 0 when the budget is used up."""
        with self._lock:
            granted = min(count, self._left)
            self._left -= granted
        return granted


class Bundle:
    """Streams to one address, measured together. Every stream is read and counted from the beginning.

    `sockets` are connected and blocking; the bundle closes them.
    """

    def __init__(self, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self._received = [0] * len(sockets)
        self._samples: list[tuple[float, int]] = []
        self._deliveries: list[tuple[float, int]] = []
        self._begun = time.monotonic()
        self._base = 0
        self._sample_lock = threading.Lock()
        self._closed = threading.Event()
        self._stop = threading.Event()
        self._senders: list[threading.Thread] = []
        self._threads = [
            threading.Thread(target=self._receive, args=(i, sock), daemon=True)
            for i, sock in enumerate(sockets)
        ]
        self._threads.append(threading.Thread(target=self._sample, daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, *budgets: SendBudget) -> None:
        """Send on all streams at once until stop(), or until one of the budgets is used up."""
        self._stop.clear()
        self._senders = [
            threading.Thread(target=self._send, args=(sock, budgets), daemon=True) for sock in self.sockets
        ]
        for thread in self._senders:
            thread.start()

    def stop(self) -> None:
        """Stop sending; bytes in the kernel's buffers still go out."""
        self._stop.set()
        for thread in self._senders:
            thread.join()
        self._senders = []

    @property
    def sending(self) -> bool:
        return any(thread.is_alive() for thread in self._senders)

    def restart(self) -> None:
        """Count from zero, from now on."""
        with self._sample_lock:
            self._samples.clear()
            self._deliveries.clear()
            self._begun = time.monotonic()
            self._base = sum(self._received)

    def samples(self) -> list[tuple[float, int]]:
        """(seconds, bytes received) every 20 ms since the beginning or restart(), the present included."""
        with self._sample_lock:
            self._note()
            return list(self._samples)

    def deliveries(self) -> list[tuple[float, int]]:
        """(seconds, bytes sent that the other kernel has) every 20 ms since the beginning or restart().

        Unlike the bytes that the other program could read, these do not pause and jump when a segment is lost
        and sent again.
        """
        with self._sample_lock:
            return list(self._deliveries)

    def infos(self) -> list[StreamInfo]:
        return [stream_info(sock) for sock in self.sockets]

    def close(self) -> None:
        """Reset the streams: bytes that are not sent yet are dropped."""
        self._stop.set()
        self._closed.set()
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)  # wakes threads that wait in the kernel
        for thread in (*self._senders, *self._threads):
            thread.join()
        for sock in self.sockets:
            sock.close()

    def _send(self, sock: socket.socket, budgets: tuple[SendBudget, ...]) -> None:
        # Linux calls a stream writable when a third of its send buffer is free. Writing much at that moment
        # keeps the buffer, and so the window, fuller than writing little each time. iperf3 does the same.
        chunk = bytes(CHUNK)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                if not poll.poll(_POLL_MS):
                    continue
                for _ in range(CHUNKS_AT_ONCE):
                    granted = 0 if self._stop.is_set() else min(budget.take(CHUNK) for budget in budgets)
                    if granted == 0:
                        return
                    sock.sendall(chunk[:granted] if granted < CHUNK else chunk)

    def _receive(self, i: int, sock: socket.socket) -> None:
        buffer = memoryview(bytearray(_RECEIVE))
        with contextlib.suppress(OSError):
            while count := sock.recv_into(buffer):
                self._received[i] += count

    def _sample(self) -> None:
        while not self._closed.wait(SAMPLE_S):
            with self._sample_lock:
                self._note()

    def _note(self) -> None:
        self._samples.append((time.monotonic() - self._begun, sum(self._received) - self._base))
        if self._senders:
            delivered = sum(stream_info(sock).delivered_bytes for sock in self.sockets)
            self._deliveries.append((time.monotonic() - self._begun, delivered))
