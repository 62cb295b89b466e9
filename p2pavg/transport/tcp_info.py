"""Figures of a TCP connection, read from the Linux kernel."""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import socket
import struct
import termios
from dataclasses import dataclass, replace
from pathlib import Path

from p2pavg.report.wire import TCP_HEADER, Wire, packet_header

_SIOCOUTQ = termios.TIOCOUTQ
_ASKED_BYTES = 512  # longer than any kernel's struct tcp_info; a kernel fills as much as it has
# Offsets in struct tcp_info of include/uapi/linux/tcp.h. Newer kernels only append.
_OPTIONS, _SND_MSS, _RTT_US, _SND_CWND, _TOTAL_RETRANS = 5, 16, 68, 80, 100
_BYTES_RECEIVED, _SEGMENTS_OUT, _NOTSENT, _DELIVERY_RATE, _BYTES_SENT = 128, 136, 144, 160, 200
_BYTES_ACKED = 120
_TIMESTAMPS, _TIMESTAMP_BYTES = 1, 12  # an option, and what it adds to each segment


@dataclass(frozen=True, slots=True)
class TcpInfo:
    rtt_s: float  # smoothed; 0.0 when unknown
    window_bytes: int
    delivery_rate_bps: float  # bit/s; 0.0 before the first sample
    retransmits: int
    unsent_bytes: int


def parse(raw: bytes) -> TcpInfo:
    """Read struct tcp_info as far as the kernel filled it; figures that it lacks are 0."""

    def field(offset: int, fmt: str) -> int:
        if len(raw) < offset + struct.calcsize(fmt):
            return 0
        return int(struct.unpack_from(fmt, raw, offset)[0])

    return TcpInfo(
        rtt_s=field(_RTT_US, "=I") / 1e6,
        window_bytes=field(_SND_MSS, "=I") * field(_SND_CWND, "=I"),
        delivery_rate_bps=field(_DELIVERY_RATE, "=Q") * 8.0,
        retransmits=field(_TOTAL_RETRANS, "=I"),
        unsent_bytes=field(_NOTSENT, "=I"),
    )


def read(sock: socket.socket) -> TcpInfo:
    """The figures of a socket; all 0 when it is closed or no TCP socket."""
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES))
    except OSError:
        return parse(b"")


def parse_wire(raw: bytes, header_bytes: int) -> Wire | None:
    """IP bytes by struct tcp_info, as far as the kernel filled it; None: the kernel does not tell.
    header_bytes: of IP and TCP, in each packet.
    """
    if len(raw) < _BYTES_SENT + 8:
        return None
    sent, received = (struct.unpack_from("=Q", raw, at)[0] for at in (_BYTES_SENT, _BYTES_RECEIVED))
    out, into = struct.unpack_from("=II", raw, _SEGMENTS_OUT)
    header = header_bytes + (_TIMESTAMP_BYTES if raw[_OPTIONS] & _TIMESTAMPS else 0)
    return Wire(sent + header * out, received + header * into)


Ends = tuple[int, bool]  # of a connection: header bytes of a packet, and whether both are on this machine


def ends(sock: socket.socket) -> Ends | None:
    """The ends of a connection, which stay as they are; None: it is not connected, or not over IP."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host = sock.getpeername()[0]
        return packet_header(host, TCP_HEADER), host == sock.getsockname()[0]
    except OSError:
        return None


def wire(sock: socket.socket, known: Ends | None = None) -> Wire | None:
    """IP bytes that a connection has carried since it began; None where the kernel does not tell. known: its
    ends; None: they are asked for.
    """
    known = known or ends(sock)
    if known is None:
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES)
    except (OSError, AttributeError):
        return None
    carried = parse_wire(raw, known[0])
    if carried is not None and known[1]:
        carried = replace(carried, sent_here=carried.sent)
    return carried


def acked_bytes(sock: socket.socket) -> int:
    """Bytes that the other side's kernel has acknowledged since the connection began; 0 when unknown."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", raw, _BYTES_ACKED)[0]) if len(raw) >= _BYTES_ACKED + 8 else 0


def window_limit_bytes() -> float:
    """The largest window that this machine's settings give a TCP stream; infinite when unknown."""
    limits = [math.inf]
    for name in ("tcp_wmem", "tcp_rmem"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            limits.append(float(Path("/proc/sys/net/ipv4", name).read_text().split()[2]))
    return min(limits)


def queued_bytes(sock: socket.socket) -> int:
    """Bytes written that the other side's kernel has not acknowledged, sent or not; 0 when unknown."""
    queued = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), _SIOCOUTQ, queued)
    except (OSError, ValueError):
        return 0
    return queued[0]
