"""The listening socket of a peer, and the connections on it whose handshake is not over."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from p2pavg.errors import AddressInUseError, ConfigurationError
from p2pavg.forkguard import guard
from p2pavg.transport.links.carried import Carried, CountedSocket

logger = logging.getLogger("p2pavg.transport")

MAX_HALF_OPEN = 256  # connections whose handshake is not over; beyond that the oldest is cut
_PORTS_TRIED = 100
_BACKLOG = 128
_ADVICE = {
    errno.EADDRNOTAVAIL: "name an address of this machine",
    errno.EACCES: "choose a port above 1023",
    errno.EMFILE: "allow this process more open files (ulimit -n)",
}
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.5


def bind(host: str, port: int, *, port_is_default: bool) -> socket.socket:
    """A listening socket. With port_is_default, the first free port from `port` on.

    Raises AddressInUseError when the port is taken, ConfigurationError when the host is not ours.
    """
    last = min(port + (_PORTS_TRIED if port_is_default and port else 1), 65536)
    for candidate in range(port, last):
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
    taken = f"port {port} is taken" if last == port + 1 else f"ports {port} to {last - 1} are taken"
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
    """Accepts, and runs `welcome(sock)` for each connection, a bounded number at a time."""

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
        self._half_open: dict[asyncio.Task[None], None] = {}  # oldest first
        self._loop.add_reader(sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            logger.warning("cannot accept a connection (%s); trying again", error.strerror)
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(_OUT_OF_DESCRIPTORS_PAUSE_S, self._again)
            return
        sock = self._carried.socket(fileno=accepted.detach())
        sock.setblocking(False)
        guard(sock)
        if len(self._half_open) >= MAX_HALF_OPEN:
            next(iter(self._half_open)).cancel()
        task = self._loop.create_task(self._serve(sock))
        self._half_open[task] = None
        task.add_done_callback(lambda done: self._half_open.pop(done, None))

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    async def _serve(self, sock: CountedSocket) -> None:
        await self._welcome(sock)

    async def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        tasks = list(self._half_open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
