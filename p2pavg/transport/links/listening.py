"""The listening socket of a peer, and the connections on it whose handshake is not over."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from p2pavg.errors import AddressInUseError, ConfigurationError, P2PAvgError
from p2pavg.forkguard import guard
from p2pavg.membership.table.carrying.streams import HEAD_BYTES, Take, is_head
from p2pavg.transport.links import raw_socket
from p2pavg.transport.links.carried import Carried, CountedSocket
from p2pavg.transport.links.half_open import HalfOpen

logger = logging.getLogger("p2pavg.transport")

_PORTS_TRIED = 100
_BACKLOG = (
    1024  # a flood fills the queue within a quarter of a second: a refused dialler tries again a second later
)
_AT_ONCE = 64  # connections that are accepted before other work of the loop has a turn
_ADVICE = {
    errno.EADDRNOTAVAIL: "name an address of this machine",
    errno.EACCES: "choose a port above 1023",
    errno.EMFILE: "allow this process more open files (ulimit -n)",
}
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.5


def bind(host: str, port: int, *, port_is_default: bool) -> socket.socket:
    """A listening socket. With port_is_default, the first free port from `port` on; 0: any free one.

    Raises AddressInUseError when the port is taken, ConfigurationError when the host is not ours.
    """
    # For port 0 the system may give two processes the same one; the second to listen is refused.
    tried = _PORTS_TRIED if port_is_default or not port else 1
    candidates = range(port, min(port + tried, 65536)) if port else [0] * tried
    for candidate in candidates:
        try:
            sock = _listen(host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                advice = _ADVICE.get(error.errno or 0, "check listen=")
                raise ConfigurationError(
                    f"cannot listen on {host}:{candidate} ({error.strerror}); {advice}"
                ) from error
            continue
        if candidate != port:
            logger.warning("port %d is taken, listening on %d", port, candidate)
        return sock
    last = candidates[-1]
    taken = f"port {port} is taken" if last == port else f"ports {port} to {last} are taken"
    raise AddressInUseError(f"{taken} on {host}; choose another with listen=")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # on "::", IPv4 comes in as well
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return guard(sock)


class Listener:
    """Accepts connections; `welcome(sock)` runs for each that sends a byte, a bounded number at a time."""

    def __init__(
        self,
        sock: socket.socket,
        welcome: Callable[[CountedSocket], Awaitable[None]],
        carried: Carried,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._carried = carried
        self._sock = sock
        self._welcome = welcome
        self._loop = asyncio.get_running_loop()
        self._half_open = HalfOpen[CountedSocket]()
        self._silent: dict[CountedSocket, float] = {}  # socket -> since when it has been silent, oldest first
        self._tasks: dict[CountedSocket, asyncio.Task[None]] = {}
        self._deadline: asyncio.TimerHandle | None = None  # of the oldest silent connection
        self._loop.add_reader(sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._sock.accept()
            except (ConnectionAbortedError, InterruptedError):
                continue
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("cannot accept a connection (%s); trying again", error.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(_OUT_OF_DESCRIPTORS_PAUSE_S, self._again)
                return
            sock = self._carried.socket(fileno=accepted.detach())
            sock.setblocking(False)
            guard(sock)
            self.admit(sock, address[0])

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def admit(self, sock: CountedSocket, host: str) -> None:
        """Take a connection with a peer at `host`, which has to speak first."""
        surplus = self._half_open.add(sock, host)
        self._silent[sock] = self._loop.time()
        self._loop.add_reader(sock.fileno(), self._spoke, sock)
        if surplus is not None:
            self._cut(surplus)
        if self._deadline is None:
            self._cut_silent()

    def _spoke(self, sock: CountedSocket) -> None:
        """Make a task for a connection that has sent a byte: silent connections cost no task."""
        del self._silent[sock]
        self._loop.remove_reader(sock.fileno())
        self._half_open.spoke(sock)
        task = self._tasks[sock] = self._loop.create_task(self._serve(sock))
        task.add_done_callback(lambda done: self._served(sock, done))

    async def _serve(self, sock: CountedSocket) -> None:
        await self._welcome(sock)

    def _served(self, sock: CountedSocket, task: asyncio.Task[None]) -> None:
        self._half_open.remove(sock)
        del self._tasks[sock]
        if task.cancelled() and not sock.owned:
            sock.close()  # the task may not have begun, and so not have closed the socket itself

    def _cut(self, sock: CountedSocket) -> None:
        self._half_open.remove(sock)
        if sock in self._tasks:
            self._tasks[sock].cancel()
            return
        del self._silent[sock]
        self._loop.remove_reader(sock.fileno())
        sock.close()

    def _cut_silent(self) -> None:
        """Cut connections that have been silent for too long, and set the timer for the next one."""
        self._deadline = None
        while self._silent:
            sock, since = next(iter(self._silent.items()))
            if since + raw_socket.HANDSHAKE_S > self._loop.time():
                self._deadline = self._loop.call_at(since + raw_socket.HANDSHAKE_S, self._cut_silent)
                return
            self._cut(sock)

    async def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        if self._deadline is not None:
            self._deadline.cancel()
        for sock in list(self._silent):
            self._cut(sock)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TablePort:
    """The TCP port of a node that only keeps the table, and has no links."""

    def __init__(self, host: str, port: int, carried: Carried | None = None) -> None:
        """carried: counts the connections. Raises AddressInUseError, ConfigurationError."""
        self._table: Take | None = None
        sock = bind(host, port, port_is_default=False)
        self.host = host
        self._listener = Listener(sock, self._welcome, carried or Carried())
        self.port = self._listener.port

    def attach(self, table: Take) -> None:
        """Pass connections on to `table`; until then they are closed."""
        self._table = table

    async def _welcome(self, sock: CountedSocket) -> None:
        try:
            async with asyncio.timeout(raw_socket.HANDSHAKE_S):
                raw = await raw_socket.receive(sock, HEAD_BYTES)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("a connection ended before it said what it is: %s", error)
            raw = b""
        if self._table is None or not is_head(raw):
            sock.close()
            return
        await self._table(sock, raw)

    async def close(self) -> None:
        """Stop listening; connections that were passed on stay open."""
        await self._listener.close()
