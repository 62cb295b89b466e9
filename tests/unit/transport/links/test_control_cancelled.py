"""A control connection that is cancelled leaves its descriptor to nobody else while a transport uses it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from p2pavg.credentials import Authority
from p2pavg.transport.links import greeting, handshake, raw_socket
from p2pavg.transport.links.carried import Carried, CountedSocket
from p2pavg.transport.links.control import ControlConnection
from p2pavg.transport.links.listening import Listener
from tests.unit.transport.endpoints import Host

DEADLINE_S = 20.0
NEVER: Any = None  # what is called later in a greeting


def nobody_else_has(descriptor: int) -> None:
    """A socket that gets the same number can be watched, so no transport still works on that."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        while sock.fileno() < descriptor:
            sock = stack.enter_context(socket.socket())
        if sock.fileno() == descriptor:
            loop.add_reader(sock, NEVER)
            loop.remove_reader(sock)


async def test_who_dialled_is_cancelled_when_tls_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends at once, with its descriptor: nobody waits for the other side's last word."""
    tls = Authority.new("run").member()
    async with Listening(tls) as (host, carried, port):
        sock = carried.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        descriptor = sock.fileno()
        hello = host.endpoint.make_hello()
        task = asyncio.create_task(greeting.as_dialler(sock, host.identity, hello, NEVER, tls))
        made = ControlConnection.connection_made

        def cancelled(self: ControlConnection, transport: asyncio.BaseTransport) -> None:
            made(self, transport)
            if self._sock is sock:
                task.cancel()

        monkeypatch.setattr(ControlConnection, "connection_made", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await task
        nobody_else_has(descriptor)
        async with asyncio.timeout(DEADLINE_S):
            while sock in carried.sockets:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)


async def test_who_listened_is_cancelled_in_its_greeting() -> None:
    """TLS waits for the other side's last word: the listener does not close the socket under it."""
    tls = Authority.new("run").member()
    async with Listening(tls) as (_, carried, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(handshake.PREAMBLE_BYTES))
        await reader.readexactly(handshake.PREAMBLE_BYTES)
        await writer.start_tls(tls.client_context, server_hostname="p2pavg")
        (sock,) = carried.sockets
        descriptor = sock.fileno()
    nobody_else_has(descriptor)
    writer.transport.abort()


class Listening:
    """A listener that greets everybody, and ends with the block; a host, what it carries, and its port."""

    def __init__(self, tls: Any) -> None:
        self._tls = tls

    async def __aenter__(self) -> tuple[Host, Carried, int]:
        self.host, carried = await Host().start(), Carried()
        port = socket.create_server(("127.0.0.1", 0))
        port.setblocking(False)
        self._listener = Listener(port, self._welcome, carried)
        return self.host, carried, self._listener.port

    async def _welcome(self, sock: CountedSocket) -> None:
        await raw_socket.receive(sock, handshake.PREAMBLE_BYTES)
        hello = self.host.endpoint.make_hello()
        await greeting.as_listener(sock, self.host.identity, hello, NEVER, NEVER, self._tls)

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()
        await self.host.close()
