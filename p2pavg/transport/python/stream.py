"""One data stream: reads frames into the places that its owner names, and writes one frame at a time.

It works on the socket itself (`loop.add_reader`, `add_writer`) rather than through an asyncio transport: a
transport does not tell when the kernel has taken a buffer's bytes, and reads and writes here scatter and
gather, so that a body and the header after it cost one call.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from p2pavg.errors import ProtocolError
from p2pavg.native import crc32
from p2pavg.report.wire import Wire
from p2pavg.transport import frames, sealing, tcp_info
from p2pavg.transport.engine import StreamKeys
from p2pavg.transport.frames import HEADER_BYTES, Header
from p2pavg.transport.python.outbox import Item
from p2pavg.transport.sealing import TAG_BYTES

_READS_PER_TURN = 8
_UNSENT_BYTES = 256 << 10  # unsent bytes in the kernel: a stalled stream holds back no more
_LEAST_UNSENT, _HELD_S = 16 << 10, 0.05  # of a stream that is paced
_UNLIMITED = 1e15  # bytes/s
_TRASH_BYTES = 64 << 10
_TAIL_BYTES = TAG_BYTES + HEADER_BYTES


class Fate(Enum):
    DROP = "read and forget the body"
    HOLD = "stop reading; resume() asks again"


class Destination(Protocol):
    """The destination of one body. Exactly one of `landed` and `lost` is called."""

    view: memoryview  # length of the body

    def landed(self, crc: int) -> None:
        """Take a body that is whole and right, with its CRC-32. May raise ProtocolError, which closes the
        stream.
        """

    def lost(self) -> None:
        """Take note that the rest of the body will not be written here."""


class Owner(Protocol):
    def route(self, stream: Stream, header: Header) -> Destination | Fate: ...

    def next_frame(self, stream: Stream) -> tuple[Item, bytes, memoryview] | None:
        """The next frame for a stream that has room: (item, header, body)."""

    def handed(self, stream: Stream, item: Item) -> None:
        """Take note that the kernel has all bytes of the frame."""

    def broken(self, stream: Stream, reason: str) -> None:
        """Take note that the stream has closed itself."""


class Stream:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: int,
        number: int,
        sock: socket.socket,
        owner: Owner,
        keys: StreamKeys | None = None,
    ) -> None:
        self.link = link
        self.number = number
        self.sock = sock
        self.closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_received_at = 0.0
        self._carried = Wire()  # when it was closed
        self._loop = loop
        self._fd = sock.fileno()
        self._owner = owner
        self._sealer = sealing.Sealer(keys.sending) if keys else None
        self._opener = sealing.Opener(keys.receiving) if keys else None
        # receiving; the tail of a frame is its tag, on an encrypted stream, and the next header
        self._tail = memoryview(bytearray(_TAIL_BYTES))
        self._tail_have = TAG_BYTES
        self._header: Header | None = None
        self._destination: Destination | None = None
        self._rest = self._tail[:0]  # of the destination
        self._unwanted = 0  # bytes of a body to read and forget
        self._held = False
        # sending
        self.item: Item | None = None  # being sent
        self._told: Item | None = None  # while it is being sent, by `unacknowledged`
        self._out_head = b""
        self._out_body = memoryview(b"")
        self._armed = False
        self._handed: deque[tuple[int, Item]] = deque()  # (end of the frame in bytes sent, what it is)

        sock.setblocking(False)
        _tune(sock)
        loop.add_reader(self._fd, self._readable)

    # -- receiving

    def _readable(self) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if self.closed or self._held:
                    return
                if not self._read():
                    self._break("closed by the other side")
                    return
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._break(str(error))
        except OSError as error:
            self._break(error.strerror or str(error))

    def _read(self) -> int:
        if self._header is None:
            got = self.sock.recv_into(self._tail[self._tail_have :])
            self._received(got)
            self._tail_have += got
        elif self._destination is None:
            got = self.sock.recv_into(_TRASH[: min(self._unwanted, _TRASH_BYTES)])
            self._received(got)
            self._unwanted -= got
            if not self._unwanted:
                self._header = None
            return got
        else:
            got = self.sock.recvmsg_into([self._rest, self._tail[self._tail_have :]])[0]
            self._received(got)
            in_body = min(got, len(self._rest))
            self._rest = self._rest[in_body:]
            self._tail_have += got - in_body
            if self._rest or self._tail_have < TAG_BYTES:
                return got
            self._body_whole(self._header, self._destination)
        if self._tail_have == _TAIL_BYTES and not self.closed:
            self._header = self._parse(self._tail[TAG_BYTES:])
            self._tail_have = TAG_BYTES if self._opener is None else 0
            self._open_body(self._header)
        return got

    def _parse(self, head: memoryview) -> Header:
        if self._opener is not None:
            self._opener.header(head)
        return frames.parse(head, checked=self._opener is not None)

    def _received(self, got: int) -> None:
        if got:
            self.bytes_received += got
            self.last_received_at = time.monotonic()

    def _open_body(self, header: Header) -> None:
        fate = self._owner.route(self, header)
        if fate is Fate.HOLD:
            self._held = True
            self._loop.remove_reader(self._fd)
        elif fate is Fate.DROP:
            self._drop(header.length)
        else:
            assert not isinstance(fate, Fate)
            self._destination = fate
            self._rest = fate.view
            if not header.length and self._opener is None:
                self._body_whole(header, fate)

    def _body_whole(self, header: Header, destination: Destination) -> None:
        self._header = self._destination = None
        try:
            if self._opener is not None:
                self._opener.body(destination.view, self._tail[:TAG_BYTES])
            crc = crc32(destination.view)
            if self._opener is None and crc != header.body_crc:
                raise ProtocolError("a frame whose checksum is wrong")
        except ProtocolError:
            destination.lost()
            raise
        destination.landed(crc)

    def _drop(self, rest: int) -> None:
        """Read and drop so many bytes of the body, and its tag."""
        self._unwanted = rest + TAG_BYTES - self._tail_have
        self._tail_have = TAG_BYTES
        if not self._unwanted:
            self._header = None

    def resume(self) -> None:
        """Ask the owner again for the destination of the frame that was held."""
        if self._held and not self.closed and self._header is not None:
            self._held = False
            self._loop.add_reader(self._fd, self._readable)
            try:
                self._open_body(self._header)
            except ProtocolError as error:
                self._break(str(error))

    def forget_destination(self) -> None:
        """Read and drop the rest of the body under way, without writing into its destination."""
        if self._destination is not None:
            destination, self._destination = self._destination, None
            self._drop(len(self._rest))
            destination.lost()

    @property
    def receiving(self) -> int | None:
        """The transfer whose body is under way into its destination."""
        return self._header.transfer if self._header is not None and self._destination is not None else None

    # -- sending

    def want_to_send(self) -> None:
        """Ask the owner for a frame once the kernel has room."""
        if not self._armed and not self.closed:
            self._armed = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        try:
            if self.item is None:
                frame = self._owner.next_frame(self)
                if frame is None:
                    self._armed = False
                    self._loop.remove_writer(self._fd)
                    return
                self.item, self._out_head, self._out_body = frame
                if self._sealer is not None:
                    self._out_head, self._out_body = self._sealer.seal(self._out_head, self._out_body)
            self._write()
        except (BlockingIOError, InterruptedError):
            return
        except ProtocolError as error:
            self._break(str(error))
        except OSError as error:
            self._break(error.strerror or str(error))

    def _write(self) -> None:
        while self._out_head or self._out_body:
            sent = self.sock.sendmsg([self._out_head, self._out_body], [], _SEND_FLAGS)
            self.bytes_sent += sent
            in_head = min(sent, len(self._out_head))
            self._out_head = self._out_head[in_head:]
            self._out_body = self._out_body[sent - in_head :]
        item, self.item = self.item, None
        self._out_body = memoryview(b"")
        assert item is not None
        self._forget_acknowledged()
        if self._may_be_copied(item):
            self._handed.append((self.bytes_sent, item))
        self._told = None
        self._owner.handed(self, item)

    def told(self, item: Item) -> bool:
        return item is self._told

    def _may_be_copied(self, item: Item) -> bool:
        return item.reducer is not None and item.not_over is None and not item.stale and not self.told(item)

    def forget_handed(self, unwanted: Callable[[Item], bool]) -> None:
        self._handed = deque(pair for pair in self._handed if not unwanted(pair[1]))

    def _forget_acknowledged(self) -> None:
        acked = self.bytes_sent - tcp_info.queued_bytes(self.sock)
        while self._handed and self._handed[0][0] <= acked:
            self._handed.popleft()

    def unacknowledged(self) -> list[Item]:
        """Chunks that the other side's kernel has not acknowledged, the one under way included, the last
        first. Each is named once, and chunks that came here from another stream are not.
        """
        self._forget_acknowledged()
        items = [item for _, item in self._handed]
        self._handed.clear()
        if self.item is not None and self._may_be_copied(self.item):
            self._told = self.item
            items.append(self.item)
        return items[::-1]

    def keep_own_copy(self) -> None:
        """Send the rest of the frame under way from a copy, as its buffer is about to change."""
        self._out_body = memoryview(bytes(self._out_body))

    def pace(self, bytes_per_second: float) -> None:
        """Limit the rate of this stream, and keep little more in the kernel than that rate sends soon."""
        if self.sock.family in _INTERNET:
            unsent = int(max(_LEAST_UNSENT, min(bytes_per_second * _HELD_S, _UNSENT_BYTES)))
            most = int(bytes_per_second) if bytes_per_second < _UNLIMITED else 2**64 - 1
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", most))
            self.sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent)

    def delivery_rate(self) -> float:
        """bit/s, as the kernel saw it last; 0 when it does not tell."""
        return 0.0 if self.closed else tcp_info.read(self.sock).delivery_rate_bps

    def wire(self) -> Wire:
        """IP bytes that the connection has carried; bytes of frames where the kernel does not tell."""
        if self.closed:
            return self._carried
        return tcp_info.wire(self.sock) or Wire(self.bytes_sent, self.bytes_received)

    # -- the end

    def close(self) -> None:
        """Without an event. Idempotent."""
        if self.closed:
            return
        self._carried = self.wire()
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._armed:
            self._loop.remove_writer(self._fd)
        self.sock.close()
        if self._destination is not None:
            destination, self._destination = self._destination, None
            destination.lost()

    def _break(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._owner.broken(self, reason)


_TRASH = memoryview(bytearray(_TRASH_BYTES))
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


def _tune(sock: socket.socket) -> None:
    """Set the socket's options. SO_SNDBUF and SO_RCVBUF stay: setting them ends the kernel's autotuning."""
    if sock.family not in _INTERNET:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


_INTERNET = (socket.AF_INET, socket.AF_INET6)
_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
