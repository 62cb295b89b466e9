"""The traffic of connections, which stays counted when a loop has closed them."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from p2pavg.membership.table.carrying.streams import HEAD_BYTES, Streams
from p2pavg.transport.links.carried import Carried, CountedSocket
from p2pavg.transport.links.control import ControlConnection

LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.mark.parametrize("kind", ["control", "table"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_closed_connection_carried_stays_counted(loop: str, kind: str) -> None:
    """Figures do not fall when a connection ends, whichever loop closes its descriptor."""
    carried = Carried()

    def sent() -> int:
        return carried.by_peer()[None].sent

    async def dial(host: str, port: int) -> CountedSocket:
        sock = carried.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        return sock

    async def work() -> tuple[int, int]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(HEAD_BYTES)
            before.append(sent())
            writer.close()
            over.set_result(None)

        before: list[int] = []
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        streams = Streams(lambda *_: None, 0, dial)
        if kind == "table":
            streams.send(b"x" * 500, (host, port), proved=True)
        else:
            connection = await ControlConnection.over(await dial(host, port), dialled=True)
            connection.write({"t": "x" * 500})
        await over
        async with asyncio.timeout(10.0):
            while carried.sockets:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        streams.close()
        server.close()
        return before[0], sent()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        before, after = runner.run(work())
    assert 500 < before <= after
