"""A link connects two peers: one control connection, and data streams that the engine drives."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from p2pavg.errors import ProtocolError, UnreachableError
from p2pavg.identity import short_id
from p2pavg.transport.links.carried import CountedSocket, Way
from p2pavg.transport.links.control import ControlConnection
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.paths import PathFacts

Message = dict[str, Any]
Opener = Callable[[], Awaitable[CountedSocket]]
_MOST_STREAMS = 1 << 16  # the most that the other side may open in a link's life, as each leaves a nonce here
_MOST_UNHEARD = 120  # pings, one a second
_ID, _RE = "_id", "_re"  # keys of a request's number: in the request, and in its answer


class Link:
    """The endpoint makes a link once its control connection is up.

    id: the link's number at the engine. hello: the other side's hello. address: (host, port) of its
    listening port, as far as known. dialled: this side opened the connection, and opens data streams too.
    way: how the link's connections are made. opener: makes the connection of a data stream; None: by dialling
    `address`.
    """

    def __init__(
        self,
        number: int,
        peer_id: bytes,
        hello: Message,
        address: tuple[str, int],
        *,
        dialled: bool,
        secret: bytes,
        connection: ControlConnection,
        rtt_s: float,
        on_close: Callable[[Link, str], None],
        party: Party,
        way: Way = Way.DIRECT,
        opener: Opener | None = None,
    ) -> None:
        self.id = number
        self.peer_id = peer_id
        self.hello = hello
        self.address = address
        self.dialled = dialled
        self.secret = secret
        self.party = party
        self.way = way
        self.opener = opener
        self.established_at = time.monotonic()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams_wanted = 0  # wanted by this side
        self.streams_asked = 0  # wanted by the other side
        self.rtt_min = rtt_s
        self.prior: PathFacts | None = None  # the measurements of its path in earlier runs
        self.brings_bps = 0.0  # bit/s that arrived while more bytes waited; 0.0: not measured yet
        self.closed = False
        self.impassable = False  # several attempts to open a data stream have failed
        self.slowed = False  # the peer has sent more than its budget, and the log has named it
        self._rtt = rtt_s
        self._connection = connection
        self._on_close = on_close
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._unheard = (
            0  # pings since the last byte arrived: a stopped process sends no pings, and so cuts no link
        )
        self._pinged_with = 0.0
        self._nonces: set[bytes] = set()  # nonces of the streams that the other side has opened

    def __repr__(self) -> str:
        return f"<Link {self.id} to {short_id(self.peer_id)} at {self.address[0]}:{self.address[1]}>"

    @property
    def sealed(self) -> bool:
        """Whether the data streams are encrypted: in a closed run, or if a third peer carries the link."""
        return self.party.closed or self.way is Way.RELAYED

    @property
    def rtt(self) -> float:
        """The smoothed round-trip time in seconds, measured since the handshake."""
        return self._rtt

    @property
    def local_host(self) -> str:
        """This machine's address at which the control connection ends."""
        return self._connection.local_host

    @property
    def last_heard(self) -> float:
        """time.monotonic() of the last byte on the control connection."""
        return self._connection.last_heard

    @property
    def quiet_s(self) -> float:
        """Seconds for which nothing came on the control connection, or nothing sent there arrived."""
        return max(time.monotonic() - self.last_heard, self.stuck_s)

    @property
    def stuck_s(self) -> float:
        """Seconds in which nothing of what this side sends on the control connection was acknowledged. After
        a cut, or behind a queue that lost packets, the kernel tries again after longer and longer pauses,
        while data streams and the other direction work.
        """
        return self._connection.stuck_s

    def first_use(self, nonce: bytes) -> None:
        """Raises ProtocolError for the nonce of a stream hello that came before: a replay."""
        if nonce in self._nonces:
            raise ProtocolError("a data stream's hello that was used before")
        self._nonces.add(nonce)
        if len(self._nonces) >= _MOST_STREAMS:
            self.close("it had as many data streams as a link can have; the next link begins anew")

    # -- sending

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message in order, without blocking. A link whose queue is full is closed, soon after:
        whoever sends may be going through all links.
        """
        if not self.closed and not self._connection.write(message):
            asyncio.get_running_loop().call_soon(self.close, "it does not take what is sent to it")

    async def request(self, message: Mapping[str, Any], timeout: float) -> Message:
        """Send, and wait for the other side's `reply`. Raises TimeoutError, UnreachableError."""
        if self.closed:
            raise UnreachableError(f"the link to peer {short_id(self.peer_id)} is closed")
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send({**message, _ID: number})
            async with asyncio.timeout(timeout):
                return await answer
        finally:
            self._answers.pop(number, None)

    def reply(self, request: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        """Answer a message that came with `request`; nothing happens when it was no request."""
        number = request.get(_ID)
        if isinstance(number, int):
            self.send({**message, _RE: number})

    def take_answer(self, message: Message) -> bool:
        """Whether the message answers a request; late answers are swallowed."""
        number = message.pop(_RE, None)
        if number is None:
            return False
        answer = self._answers.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)
        return True

    # -- measuring

    def ping(self) -> None:
        """Called once a second: ping, or close a link on which nothing has come for very long."""
        self._unheard = self._unheard + 1 if self.last_heard == self._pinged_with else 0
        self._pinged_with = self.last_heard
        if self._unheard > _MOST_UNHEARD:
            self.close(f"nothing was heard for {_MOST_UNHEARD} s")
        self.send({"t": "_ping", "at": time.monotonic_ns()})

    def ponged(self, stamp: object) -> None:
        if isinstance(stamp, int):
            rtt = (time.monotonic_ns() - stamp) / 1e9
            if rtt >= 0:
                self._rtt += (rtt - self._rtt) / 8
                self.rtt_min = min(self.rtt_min, rtt)

    async def alive(self, timeout: float) -> bool:
        """Ping the other side, and say whether it answers."""
        try:
            await self.request({"t": "_alive"}, timeout)
        except (TimeoutError, UnreachableError):
            return False
        return True

    # -- the end

    def close(self, reason: str) -> None:
        """Close the control connection and all data streams. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._connection.close()
        if not self.ready.done():
            self.ready.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(
                    UnreachableError(f"the link to {short_id(self.peer_id)} closed: {reason}")
                )
        self._on_close(self, reason)
