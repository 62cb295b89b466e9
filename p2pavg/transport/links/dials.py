"""Dials: connections that this peer opens, from an address to a link; one at a time to each address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pavg.errors import P2PAvgError, UnreachableError
from p2pavg.forkguard import guard
from p2pavg.identity import short_id
from p2pavg.membership.table.address import normalise
from p2pavg.transport.links import greeting, handshake
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import CountedSocket
from p2pavg.transport.links.handshake import Hello, Refusal
from p2pavg.transport.links.link import Link, Opener
from p2pavg.transport.links.link_maker import LinkMaker

Address = tuple[str, int]
PROVED_S = 2.0  # seconds left, at least, once this side has proved who it is: both sides have given up an
# older link by then, and a dial that ends now leaves them without any


class Dials:
    """Opens connections, and greets over them, for an endpoint. Runs on the event loop."""

    def __init__(self, maker: LinkMaker, make_socket: Callable[..., CountedSocket]) -> None:
        self._maker = maker
        self._make_socket = make_socket
        self._under_way: dict[Address, asyncio.Task[Link]] = {}

    async def close(self) -> None:
        """Give up all dials, and wait for their end."""
        dials = list(self._under_way.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)

    async def connect(self, address: Address, expect: bytes | None, timeout: float, *, anew: bool) -> Link:
        """Return the link to the peer at an address, by a running dial to it where there is one. Raises like
        `Endpoint.connect`.
        """
        dial = self._under_way.get(address)
        if dial is None:
            dialled = self._dial(*address, expect, timeout, anew)
            dial = self._under_way[address] = asyncio.get_running_loop().create_task(dialled)
            dial.add_done_callback(lambda done: self._over(address, done))
        return await asyncio.shield(dial)

    def _over(self, address: Address, dial: asyncio.Task[Link]) -> None:
        self._under_way.pop(address, None)
        if not dial.cancelled():
            dial.exception()  # marks the exception as seen when no caller waits any more

    async def _dial(self, host: str, port: int, expect: bytes | None, timeout: float, anew: bool) -> Link:
        try:
            async with asyncio.timeout(timeout) as limit:
                sock = await wire.dial(host, port, self._make_socket)
                guard(sock)
                return await self._greet(sock, expect, limit, anew=anew)
        except Refusal as refusal:
            raise refusal.error() from None
        except TimeoutError:
            raise UnreachableError(f"{host}:{port} did not answer within {timeout:.3g} s") from None
        except P2PAvgError:
            raise
        except OSError as error:
            raise UnreachableError(
                f"nobody answers at {host}:{port} ({error.strerror or error}); check address and firewall"
            ) from None

    async def greet(self, sock: CountedSocket, expect: bytes, opener: Opener, timeout: float) -> Link:
        """Return the link to a peer over an existing connection. Raises like `Endpoint.greet`."""
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._greet(sock, expect, limit, opener=opener, anew=True)
        except Refusal as refusal:
            raise refusal.error() from None
        except TimeoutError:
            who = short_id(expect)
            raise UnreachableError(f"peer {who} did not answer within {timeout:.3g} s") from None
        except OSError as error:
            raise UnreachableError(f"the connection to peer {short_id(expect)} broke ({error})") from None

    async def _greet(
        self,
        sock: CountedSocket,
        expect: bytes | None,
        limit: asyncio.Timeout,
        *,
        anew: bool = False,
        opener: Opener | None = None,
    ) -> Link:
        maker, way = self._maker, sock.way
        remote = normalise(sock.getpeername())
        mine = maker.make_hello()
        peer_id = b""

        async def admit(theirs: Hello) -> None:
            nonlocal peer_id
            maker.check(mine, theirs, expect)
            peer_id = theirs.peer_id
            await maker.pairing.as_dialler(theirs, anew=anew, way=way)
            least = asyncio.get_running_loop().time() + PROVED_S
            limit.reschedule(max(limit.when() or least, least))

        try:
            met = await greeting.as_dialler(sock, maker.identity, mine, admit, maker.tls(way))
        except Refusal as refusal:
            if refusal.code == handshake.SUPERSEDED.code and peer_id:
                return await maker.pairing.arrival(peer_id)
            raise
        finally:
            maker.pairing.proved(peer_id)
        sock.peer = peer_id
        return maker.establish(met, remote, dialled=True, way=way, opener=opener)
