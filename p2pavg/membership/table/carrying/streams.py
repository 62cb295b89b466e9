"""Datagrams of the table over TCP, for nodes that UDP does not reach.

A connection to the TCP port of a node begins with 16 bytes from each side; then come datagrams, each after
its length:
```
0 6s magic "P2PTBL"   6 u8 version   7 u8 zero   8 u16 port   10 6s zeros
16 u16 length, datagram; and so on
```
`port` is where the sender takes connections itself; 0: it does not. Who asks has dialled, and is answered
over the same connection; so two nodes that both ask have two. What comes over one counts as from the sender's
host and that port: not more than anybody at that host may claim, who shares it with others anyway.

TCP shows that who asks receives there. Who is dialled without having shown anything gets one packet, and the
16 bytes when it answers that; more when it speaks this protocol.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from p2pavg.forkguard import guard
from p2pavg.membership.table.address import Address, normalise
from p2pavg.membership.table.carrying.shares import Shares
from p2pavg.membership.table.throttle import Throttle
from p2pavg.membership.table.wire import MAX_DATAGRAM, VERSION
from p2pavg.networks import is_private, network_of, source_of

logger = logging.getLogger("p2pavg.membership")

_MAGIC = b"P2PTBL"
_HEAD = struct.Struct(">6sBBH6x")
HEAD_BYTES = _HEAD.size
_LENGTH = struct.Struct(">H")
SYN_BYTES = 60  # the packet that opens a connection, with the headers of IP and TCP
PATIENT_DIAL_S = 5.0
STRANGER_DIAL_S = 0.9  # the system sends a second packet after one second
IDLE_SECONDS = 60.0  # without a datagram: then the connection is closed
SWEEP_SECONDS = 10.0
MOST_ACCEPTED, MOST_OF_NETWORK, MOST_OF_SOURCE = 1024, 256, 64  # connections of others
MOST_DIALLED = 512
MOST_WAITING = 8  # datagrams, while a connection is being opened
MOST_UNSENT = 1 << 16  # bytes: what is beyond is lost, as over UDP
FRAMES_PER_S, FRAMES_AT_ONCE = 1000.0, 2000.0  # of one source; beyond, it is read more slowly
OPENED_PER_S, OPENED_AT_ONCE = 50.0, 512.0  # connections of one source
OF_NETWORK = 4.0  # times as many datagrams and connections a network may have as one source

Dial = Callable[[str, int], Awaitable[socket.socket]]
"""Opens a connection; raises OSError."""

Take = Callable[[socket.socket, bytes], Awaitable[None]]
"""Given a connection that somebody opened, and the first bytes that came over it."""

Write = Callable[[bytes], bool]
Received = Callable[[bytes, Address, Write, bool], None]
"""Told (datagram, address of its sender, how it is answered, whether this node dialled)."""


def head(port: int) -> bytes:
    """The first bytes of a connection. port: where this node takes connections; 0: nowhere."""
    return _HEAD.pack(_MAGIC, VERSION, 0, port)


def is_head(raw: bytes) -> bool:
    """Whether the first 16 bytes of a connection say that it is one of the table, of any version."""
    return raw[: len(_MAGIC)] == _MAGIC


def parse_head(raw: bytes) -> int | None:
    """The port in the first bytes of a connection; None when no node of this version sends them."""
    if len(raw) != HEAD_BYTES:
        return None
    magic, version, zero, port = _HEAD.unpack(raw)
    if magic != _MAGIC or version != VERSION or zero or raw[10:] != bytes(6):
        return None
    return int(port)


def pack_frame(datagram: bytes) -> bytes:
    """A datagram as it travels on a connection."""
    return _LENGTH.pack(len(datagram)) + datagram


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """The whole datagrams at the beginning of a buffer, which they leave. Raises ValueError for an impossible
    length.
    """
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if not 0 < length <= MAX_DATAGRAM:
            raise ValueError(f"a datagram of {length} bytes")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        datagram = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield datagram


async def dial_plainly(host: str, port: int) -> socket.socket:
    """A connection of its own, counted by nobody."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return await connected(socket.socket(family, socket.SOCK_STREAM), host, port)


async def connected(sock: socket.socket, host: str, port: int) -> socket.socket:
    """The TCP socket, connected as the table's connections are; closed when that fails."""
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(
        self,
        address: Address,
        first: bytes,
        received: Callable[[bytes, Connection], None],
        pause_s: Callable[[int], float],
        on_lost: Callable[[Connection], None],
        *,
        greeted: bool,
    ) -> None:
        """first: this side's first bytes. greeted: the other side's were read already. pause_s(datagrams):
        how long nothing is read after so many.
        """
        self.address = address
        self.heard_at = asyncio.get_running_loop().time()
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if greeted:
            self.greeted.set_result(None)
        self._first = first
        self._received = received
        self._pause_s = pause_s
        self._on_lost = on_lost
        self.settle: Callable[[], None] = lambda: None  # called when it carries nothing any more
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._paused = False

    def write(self, datagram: bytes) -> bool:
        """Send it, unless too much waits already."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > MOST_UNSENT:
            return False
        self.heard_at = asyncio.get_running_loop().time()
        transport.write(pack_frame(datagram))
        return True

    def close(self) -> None:
        """End it; what was written may be lost."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether it may carry something."""
        return self._transport is not None and not self._transport.is_closing()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._paused:
            self._take()

    def _take(self) -> None:
        try:
            if not self.greeted.done():
                if len(self._buffer) < HEAD_BYTES:
                    return
                if parse_head(bytes(self._buffer[:HEAD_BYTES])) is None:
                    raise ValueError("not the first bytes of a node of this version")
                del self._buffer[:HEAD_BYTES]
                self.greeted.set_result(None)
            count = 0
            for datagram in take_frames(self._buffer):
                count += 1
                self._received(datagram, self)
        except ValueError as error:
            logger.debug("a connection of the table from %s ends: %s", self.address[0], error)
            self.close()
            return
        if count:
            self.heard_at = asyncio.get_running_loop().time()
            self._pause(self._pause_s(count))

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self.is_open and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        if self.is_open and self._transport is not None:
            self._transport.resume_reading()
            self._take()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionError("the connection ended before it was one of the table"))
            self.greeted.exception()
        self._transport = None
        self.settle()
        self._on_lost(self)


class Streams:
    """All connections of one node. On the loop thread."""

    def __init__(self, received: Received, port: int, dial: Dial = dial_plainly) -> None:
        """port: where this node takes connections, which `take` is given; 0: nowhere."""
        self._received = received
        self._port = port
        self._dial = dial
        self._dialled: OrderedDict[Address, Connection] = OrderedDict()
        self._dialling: dict[Address, tuple[asyncio.Task[None], list[bytes]]] = {}
        self._accepted: set[Connection] = set()
        self._shares = Shares[Connection](
            most=MOST_ACCEPTED, of_network=MOST_OF_NETWORK, of_source=MOST_OF_SOURCE
        )
        self._nowhere: dict[Address, Connection] = {}  # accepted from who takes none
        self._frames = Throttle(rate=FRAMES_PER_S, burst=FRAMES_AT_ONCE)
        self._opened = Throttle(rate=OPENED_PER_S, burst=OPENED_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        self._closed = False

    def has(self, address: Address) -> bool:
        """Whether something sent there goes at once."""
        return address in self._dialled or address in self._nowhere

    def is_only_way(self, address: Address) -> bool:
        """Whether whoever is there takes no connections, and is reached over its own."""
        return address in self._nowhere

    def send(self, data: bytes, address: Address, *, proved: bool) -> bool:
        """Whether it went, or waits for a connection. proved: of a node that has shown that it receives."""
        connection = self._dialled.get(address) or self._nowhere.get(address)
        if connection is not None:
            return connection.write(data)
        if self._closed:
            return False
        if address in self._dialling:
            waiting = self._dialling[address][1]
            if len(waiting) >= MOST_WAITING:
                return False
            waiting.append(data)
            return True
        waiting = [data]
        task = self._loop.create_task(self._open(address, waiting, proved))
        self._dialling[address] = task, waiting
        return True

    async def _open(self, address: Address, waiting: list[bytes], proved: bool) -> None:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(PATIENT_DIAL_S if proved else STRANGER_DIAL_S):
                sock = guard(await self._dial(*address))
            connection = self._connection(address, dialled=True, greeted=False)
            await self._start(connection, sock)
            if not proved:
                async with asyncio.timeout(PATIENT_DIAL_S):
                    await connection.greeted
            for data in waiting:
                connection.write(data)
            if connection.is_open:
                self._dialled[address] = connection
                if len(self._dialled) > MOST_DIALLED:
                    min(self._dialled.values(), key=lambda other: other.heard_at).close()
        except (OSError, TimeoutError) as error:
            logger.debug("no connection of the table to %s:%d: %s", *address, error)
            if connection is not None:
                connection.close()
        finally:
            self._dialling.pop(address, None)

    async def _start(self, connection: Connection, sock: socket.socket) -> None:
        connection.settle = getattr(sock, "settle", connection.settle)  # of sockets that are counted
        try:
            await self._loop.create_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            raise

    def _connection(self, address: Address, *, dialled: bool, greeted: bool) -> Connection:
        return Connection(
            address,
            head(self._port),
            lambda data, connection: self._received(data, address, connection.write, dialled),
            lambda count: self._pause_s(address[0], count),
            self._lost,
            greeted=greeted,
        )

    async def take(self, sock: socket.socket, raw: bytes) -> None:
        """A connection that somebody opened, and its first bytes. Closes what is not taken."""
        try:
            host, port = normalise(sock.getpeername())
        except OSError:
            sock.close()
            return
        listens = parse_head(raw)
        if listens is None or self._closed or not self._admits(host):
            sock.close()
            return
        if crowd := self._shares.crowd(host):
            goes = min(crowd, key=lambda connection: connection.heard_at)
            goes.close()
            self._lost(goes)
        connection = self._connection((host, listens or port), dialled=False, greeted=True)
        self._accepted.add(connection)
        self._shares.add(connection, host)
        if not listens:
            self._nowhere[host, port] = connection
        try:
            await self._start(connection, sock)
        except OSError:
            self._lost(connection)

    def _admits(self, host: str) -> bool:
        """Whether one more connection from there is taken now."""
        now = self._loop.time()
        if not self._opened.admits(source_of(host), now):
            return False
        return is_private(host) or self._opened.admits(network_of(host), now, 1 / OF_NETWORK)

    def _pause_s(self, host: str, count: int) -> float:
        """How long nothing is read from there after so many datagrams."""
        now = self._loop.time()
        pause = self._frames.owes(source_of(host), now, count)
        return (
            pause
            if is_private(host)
            else max(pause, self._frames.owes(network_of(host), now, count / OF_NETWORK))
        )

    def _lost(self, connection: Connection) -> None:
        self._accepted.discard(connection)
        self._shares.remove(connection)
        for kept in (self._dialled, self._nowhere):
            if kept.get(connection.address) is connection:
                del kept[connection.address]

    def listens_at(self, port: int) -> None:
        """Others get through to this port, 0: to none; connections are opened anew, and say so."""
        self._port = port
        for connection in list(self._dialled.values()):
            connection.close()

    def _sweep(self) -> None:
        idle = self._loop.time() - IDLE_SECONDS
        for connection in (*self._dialled.values(), *self._accepted):
            if connection.heard_at < idle:
                connection.close()
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def close(self) -> None:
        self._closed = True
        self._sweeping.cancel()
        for task, _ in self._dialling.values():
            task.cancel()
        for connection in (*self._dialled.values(), *self._accepted):
            connection.close()
