"""Exact reads and writes on a raw non-blocking socket, before an engine or a transport owns it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from p2pavg.errors import UnreachableError
from p2pavg.membership.table.address import families_in_turn
from p2pavg.transport.links import handshake

Sock = TypeVar("Sock", bound=socket.socket)
Info = tuple[int, int, int, str, Any]  # a result of getaddrinfo
HEAD_START_S = 0.25
HANDSHAKE_S = 10.0  # the longest a handshake may take: round trips of the slowest path, lost packets included


async def dial(host: str, port: int, make: Callable[[int, int, int], Sock]) -> Sock:
    """Connect a non-blocking TCP socket, made by make(family, kind, protocol). Raises the OSError of the last
    address tried.

    A name with several addresses is tried at one after the other, IPv6 and IPv4 in turn; the next one a
    quarter of a second after the last, or when that fails (RFC 8305). The first to answer is kept.
    """
    found = in_turn(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
    waiting = iter(found)
    under_way: set[asyncio.Task[Sock]] = set()
    error: OSError = OSError(f"{host} has no address")
    try:
        while (following := next(waiting, None)) is not None or under_way:
            if following is not None:
                under_way.add(asyncio.ensure_future(_connect(following, make)))
            patience = HEAD_START_S if following is not None and following is not found[-1] else None
            done, under_way = await asyncio.wait(
                under_way, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            connected = [task for task in done if task.exception() is None]
            for surplus in connected[1:]:
                surplus.result().close()
            if connected:
                return connected[0].result()
            for task in done:
                failure = task.exception()
                if not isinstance(failure, OSError):
                    raise failure or error
                error = failure
        raise error
    finally:
        for task in under_way:
            task.cancel()
            task.add_done_callback(_close_late)


def in_turn(found: Sequence[Info]) -> list[Info]:
    """Answers of getaddrinfo: the families in turn, beginning with that of the first answer."""
    return families_in_turn(found, lambda info: info[0])


async def _connect(info: Info, make: Callable[[int, int, int], Sock]) -> Sock:
    family, kind, protocol, _, address = info
    sock = make(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _close_late(task: asyncio.Task[Sock]) -> None:
    """Close the socket of an attempt that connected after another one had won."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes, never more. Raises UnreachableError at the end of the stream."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        got = await loop.sock_recv(sock, count - len(data))
        if not got:
            raise UnreachableError("the other side broke off the handshake")
        data += got
    return bytes(data)


async def receive_message(sock: socket.socket) -> dict[str, Any]:
    """A hello-sized message. Raises ProtocolError, UnreachableError."""
    head = await receive(sock, handshake.HEAD_BYTES)
    length, crc = handshake.parse_head(head, handshake.MAX_HELLO_BYTES)
    body = await receive(sock, length)
    handshake.check_body(body, crc)
    return handshake.unpack(body)


async def at_end(sock: socket.socket) -> None:
    """Wait until the other side closes, and drop its bytes until then. Raises OSError."""
    while await asyncio.get_running_loop().sock_recv(sock, 1024):
        pass


_PROBES = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}  # detects a dead end within a minute


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel detect that the other side is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
