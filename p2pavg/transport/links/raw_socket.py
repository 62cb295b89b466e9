"""Exact reads and writes on a raw non-blocking socket, before it is handed over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from p2pavg.errors import UnreachableError
from p2pavg.transport.links import handshake

Sock = TypeVar("Sock", bound=socket.socket)
HANDSHAKE_S = 10.0  # the longest a handshake may take: round trips of the slowest path, lost packets included


async def dial(host: str, port: int, make: Callable[[int, int, int], Sock]) -> Sock:
    """A connected non-blocking TCP socket, made by make(family, kind, protocol). Raises OSError of the last
    address tried.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    error: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in found:
        sock = make(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


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
    """Until the other side closes; what it says meanwhile is not kept. Raises OSError."""
    while await asyncio.get_running_loop().sock_recv(sock, 1024):
        pass


_PROBES = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}  # a dead end shows within a minute


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel find out when the other side is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
