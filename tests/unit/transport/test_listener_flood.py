"""Silent connections by the thousand keep nobody out whose handshake takes long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from p2pavg.transport.links import handshake, raw_socket
from tests.unit.transport.endpoints import DEADLINE_S, Host
from tests.unit.transport.engine_swarm import poll

PER_S = 4000
FLOODERS = 2  # processes: one makes 2,300 to 3,200 connections a second on a busy machine
ONE_WAY_S = 0.1  # a round trip of 200 ms
FLOOD = """
import collections, resource, socket, struct, sys, time
port, per_s, addresses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held, opened, began = collections.deque(), 0, time.monotonic()
while True:
    for _ in range(min(200, int((time.monotonic() - began) * per_s) - opened)):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.bind((addresses[opened % len(addresses)], 0))
        sock.connect_ex(("127.0.0.1", port))
        held.append(sock)
        opened += 1
        if opened == per_s // 4:
            print("flowing", flush=True)
    while len(held) > min(per_s, most - 100):  # long after the other side has cut them
        held.popleft().close()
    time.sleep(0.002)
"""


@contextlib.asynccontextmanager
async def flood(port: int, addresses: list[str]) -> AsyncIterator[None]:
    """As many connections a second as this machine can make, PER_S at most, until the block ends."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FLOOD, str(port), str(PER_S // FLOODERS), *addresses),
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(FLOODERS)
    ]
    try:
        async with asyncio.timeout(DEADLINE_S):
            for process in processes:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"flowing\n"
        yield
        assert all(process.returncode is None for process in processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Far:
    """A way to a port that takes ONE_WAY_S in each direction."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._serving: list[asyncio.Task[None]] = []

    async def start(self) -> Far:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.append(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(self._carry(reader, there_writer), self._carry(there_reader, writer))
        finally:
            for end in (writer, there_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                loop.call_later(ONE_WAY_S, writer.write, data)
        await asyncio.sleep(ONE_WAY_S)  # what is on its way arrives first
        writer.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@pytest.mark.parametrize(
    "addresses", [["127.0.0.2"], [f"127.0.0.{2 + number}" for number in range(16)]], ids=["one", "sixteen"]
)
async def test_a_member_far_away_gets_in(addresses: list[str]) -> None:
    """While silent connections flood the port, a member 200 ms away links at the first try, and its data
    stream, once lost, is opened again.
    """
    victim, member = await Host().start(streams=1), await Host().start(streams=1)
    far = await Far(victim.endpoint.port).start()
    try:
        async with flood(victim.endpoint.port, addresses):
            link = await member.endpoint.connect("127.0.0.1", far.port, timeout=DEADLINE_S)
            await poll(lambda: member.engine.streams(link.id))
            (lost,) = member.engine.streams(link.id)
            member.endpoint._replace_stream(link, lost)
            theirs = victim.link_to(member)
            await poll(lambda: set(victim.engine.streams(theirs.id)) - {lost})
            await poll(lambda: set(member.engine.streams(link.id)) - {lost})
            assert not link.closed
            assert not theirs.closed
    finally:
        await member.close()
        await victim.close()
        await far.close()


@pytest.mark.parametrize("addresses", [1, 16])
async def test_silent_connections_drive_out_none_that_speaks(addresses: int) -> None:
    """Hundreds of silent connections later, one that had begun its handshake before them goes on with it."""
    victim = await Host().start(streams=1)
    loop = asyncio.get_running_loop()
    begun = handshake.preamble(handshake.CONTROL, handshake.Party.of("run", closed=False))
    silent: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(await raw_socket.dial("127.0.0.1", victim.endpoint.port, socket.socket))
        await raw_socket.send(slow, begun[:4])
        for number in range(400):
            silent.append(stack.enter_context(socket.socket()))
            silent[-1].setblocking(False)
            silent[-1].bind((f"127.0.0.{2 + number % addresses}", 0))
            await loop.sock_connect(silent[-1], ("127.0.0.1", victim.endpoint.port))
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(silent[0], 1) == b""  # the first of them is long gone
            await raw_socket.send(slow, begun[4:])
            assert len(await raw_socket.receive(slow, handshake.PREAMBLE_BYTES)) == handshake.PREAMBLE_BYTES
    await victim.close()
