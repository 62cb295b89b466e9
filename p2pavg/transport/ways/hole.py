"""One local port at which two peers meet: it listens there and dials from there, as a NAT maps ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection, Sequence

from p2pavg.errors import UnreachableError
from p2pavg.forkguard import guard
from p2pavg.transport.links import observing
from p2pavg.transport.links.carried import CountedSocket
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.ways import punching
from p2pavg.transport.ways.punching import Address

Make = Callable[..., CountedSocket]
_BACKLOG = 4
_SPEAKS_S = 2.0  # beyond a round trip: how long the other side may take to say its first word


def available() -> bool:
    """Whether several sockets of this system may share a port."""
    return hasattr(socket, "SO_REUSEPORT")


class Hole:
    """Use in a `with` block: the port is free again after it."""

    def __init__(self, make: Make, family: int) -> None:
        """make: as of `Carried.socket`. family: of the addresses that are to be dialled."""
        self._make = make
        self._family = family
        self._observed: CountedSocket | None = None
        self._listening = self._socket(0)
        self._port: int = self._listening.getsockname()[1]
        self._listening.listen(_BACKLOG)

    def __enter__(self) -> Hole:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        if self._observed is not None:
            self._observed.close()

    def _socket(self, port: int) -> CountedSocket:
        """Bound to the port; 0: to a free one."""
        sock = self._make(self._family, socket.SOCK_STREAM, 0)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("::" if self._family == socket.AF_INET6 else "0.0.0.0", port))
        except BaseException:
            sock.close()
            raise
        guard(sock)
        return sock

    async def observe(self, host: str, port: int, party: Party) -> tuple[Address, ...]:
        """Where a member at (host, port) sees connections from this port, and where they begin.

        Raises OSError, ProtocolError, UnreachableError, Refusal.
        """
        sock = self._observed = self._socket(self._port)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        outside = await observing.ask(sock, party)
        inside: Address = sock.getsockname()[:2]
        return (outside, inside) if punching.is_inside(inside[0]) and inside != outside else (outside,)

    async def meet(self, targets: Sequence[Address], rtt_s: float, *, speaks: bool) -> CountedSocket:
        """A connection with the other side, after a few short bursts of dials. Raises UnreachableError.

        speaks: this side says the first word, on the first connection that comes about. Of several, the other
        side takes the one on which that word comes.
        """
        loop = asyncio.get_running_loop()
        meeting = _Meeting(speaks)
        tasks = [loop.create_task(self._accept(meeting, {host for host, _ in targets}))]
        try:
            for _ in range(punching.BURSTS):
                tasks += (loop.create_task(self._dial(target, meeting)) for target in targets)
                if await meeting.over(punching.burst_s(rtt_s)):
                    break
                await _stopped(tasks[1:])
            if meeting.waits:
                await meeting.over(rtt_s + _SPEAKS_S)
            return meeting.chosen()
        finally:
            await _stopped(tasks)
            meeting.close()

    async def _accept(self, meeting: _Meeting, hosts: Collection[str]) -> None:
        """A NAT that lets in everybody, or every port of an address, lets in what no dial of ours meets."""
        while True:
            accepted, address = await asyncio.get_running_loop().sock_accept(self._listening)
            if address[0] not in hosts:
                accepted.close()  # a stranger whom such a NAT lets in as well
                continue
            sock = self._make(fileno=accepted.detach())
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            guard(sock)
            meeting.add(sock)

    async def _dial(self, target: Address, meeting: _Meeting) -> None:
        """Until there is a connection: who is refused was too early, but not for ever."""
        for dials in range(1, punching.MOST_DIALS + 1):
            sock: CountedSocket | None = None
            try:
                sock = self._socket(self._port)
                await asyncio.get_running_loop().sock_connect(sock, target)
            except OSError:
                if sock is not None:
                    sock.close()
                await asyncio.sleep(punching.refused_pause_s(dials))
            except BaseException:
                if sock is not None:
                    sock.close()
                raise
            else:
                meeting.add(sock)
                return


async def _stopped(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Meeting:
    """Connections that came about at one hole, of which one is kept."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._loop = asyncio.get_running_loop()
        self._chosen: asyncio.Future[CountedSocket] = self._loop.create_future()
        self._silent: set[CountedSocket] = set()

    @property
    def waits(self) -> bool:
        """Whether there are connections on which nothing was said."""
        return bool(self._silent)

    def add(self, sock: CountedSocket) -> None:
        if self._chosen.done():
            sock.close()
        elif self._speaks:
            self._chosen.set_result(sock)
        else:
            self._silent.add(sock)
            self._loop.add_reader(sock.fileno(), self._spoke, sock)

    def _spoke(self, sock: CountedSocket) -> None:
        self._forget(sock)
        try:
            ended = not sock.recv(1, socket.MSG_PEEK)
        except OSError:
            ended = True
        if ended or self._chosen.done():
            sock.close()  # the other side took another one, or had given this one up
        else:
            self._chosen.set_result(sock)

    def _forget(self, sock: CountedSocket) -> None:
        self._loop.remove_reader(sock.fileno())
        self._silent.discard(sock)

    async def over(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._chosen), timeout)
        return self._chosen.done()

    def chosen(self) -> CountedSocket:
        if not self._chosen.done():
            raise UnreachableError("the NATs between the two peers let no connection through")
        return self._chosen.result()

    def close(self) -> None:
        for sock in list(self._silent):
            self._forget(sock)
            sock.close()
