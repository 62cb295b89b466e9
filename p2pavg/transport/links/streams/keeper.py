"""Data streams of a link: the side that dialled it keeps the wanted number open, the other accepts them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping

from p2pavg.errors import P2PAvgError, ProtocolError
from p2pavg.forkguard import guard
from p2pavg.identity import short_id
from p2pavg.transport.engine import Engine
from p2pavg.transport.links import handshake, proofs
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import Carried, CountedSocket
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.links.link import Link

logger = logging.getLogger("p2pavg.transport")

MOST_ACCEPTED = 256  # streams of one link that a peer accepts from the other side
_BACKOFF_S = (0.1, 5.0)
_SOON_S = 0.5  # the longest pause while the control connection works
_ATTEMPT_S, _ATTEMPT_TRIPS = 2.0, 4  # how long a stream may take to open; each third time, as any handshake:
_LONG = 3  # the kernel's own pauses between two tries last longer than most cuts
_QUIET_S = 0.05  # a stream that received nothing for so long, while nothing is transferred, may be closed
HEARD_S = 1.5  # pings and their answers come each second
# Of a link that was not made by dialling, as each stream costs others words and packets:
_MOST_FAILURES = 3  # without any stream; then the link closes
_ENOUGH = 4  # streams, where more are wanted: most of what the path carries
_REST_S = 60.0  # till the others are tried again; the longest pause while there are fewer
_DOUBLED = 16  # failures in a row, beyond which pauses grow no more
_LASTING_S = 1.0  # a stream that closes sooner has failed to open


class StreamKeeper:
    def __init__(self, link: Link, engine: Engine, carried: Carried) -> None:
        self._link = link
        self._carried = carried
        self._engine = engine
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._failures = 0
        self._opened_at = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run())

    def check(self) -> None:
        """Open or close streams after the wanted number changed, or a stream closed."""
        self._changed.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        link = self._link
        while not link.closed:
            self._changed.clear()
            wanted = self._wanted()
            lacking = wanted - len(self._engine.streams(link.id))
            if lacking > 0:
                if self._failures:
                    await self._wait()
                opened = await asyncio.gather(*(self._open(next(self._numbers)) for _ in range(lacking)))
                good = any(opened) if link.opener is None else self._is_enough(wanted)
                self._failures = 0 if good else self._failures + 1
                if link.opener is not None and self._failures > _MOST_FAILURES and self._is_useless():
                    link.impassable = True
                    link.close("no data stream gets through")
                elif link.opener is not None and good and not all(opened):
                    await self._rest(wanted)
                continue
            if lacking < 0 and self._close_quiet(-lacking):
                await asyncio.sleep(_QUIET_S)
                continue
            await self._changed.wait()
            if time.monotonic() - self._opened_at < _LASTING_S:
                self._failures += 1  # the stream did not last: the next one is opened after a pause

    def _wanted(self) -> int:
        return min(max(self._link.streams_wanted, self._link.streams_asked), MOST_ACCEPTED)

    def _is_enough(self, wanted: int) -> bool:
        """Whether a link that was not made by dialling has what makes it worth its while. Fewer streams are
        worth more than none, as each mostly carries more than a relay: the link is kept.
        """
        return len(self._engine.streams(self._link.id)) >= min(wanted, _ENOUGH)

    def _is_useless(self) -> bool:
        """Whether words pass, and no data stream does: it never did, or the NATs have changed since."""
        if not self._link.ready.done():
            return True
        return not self._engine.streams(self._link.id) and self._link.quiet_s < HEARD_S

    async def _wait(self) -> None:
        """The pause before the next try, which comes at once when the last stream ends meanwhile."""
        had = bool(self._engine.streams(self._link.id))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause()):
                while not had or self._engine.streams(self._link.id):
                    self._changed.clear()
                    await self._changed.wait()
                self._failures = 0

    async def _rest(self, wanted: int) -> None:
        """Try no further streams for a while, unless another number is wanted, or some are lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST_S):
                while self._wanted() == wanted and self._is_enough(wanted):
                    self._changed.clear()
                    await self._changed.wait()

    def _at_work(self) -> bool:
        jobs = self._engine.running()
        return self._engine.receives_blobs or any(self._link.id in job.links for job in jobs)

    def _patience(self) -> float:
        if self._failures % _LONG == _LONG - 1 or self._link.opener is not None:
            return wire.HANDSHAKE_S
        return min(wire.HANDSHAKE_S, _ATTEMPT_S + _ATTEMPT_TRIPS * self._link.rtt)

    def _pause(self) -> float:
        first, most = _BACKOFF_S
        if self._link.opener is not None and self._link.ready.done():
            most = _REST_S
        elif self._link.quiet_s < HEARD_S and self._link.opener is None:
            most = _SOON_S
        return min(first * 2.0 ** min(self._failures - 1, _DOUBLED), most) * random.uniform(0.5, 1.0)

    def _close_quiet(self, surplus: int) -> bool:
        """Close streams with no bytes in flight in either direction, as chunks in flight would be lost.

        True: streams are left to close later.
        """
        now, link = time.monotonic(), self._link
        if self._at_work():
            return True
        for stats in reversed(self._engine.stats(link.id)):
            if surplus and not stats.unacked_bytes and now - stats.last_received_at > _QUIET_S:
                self._engine.detach(link.id, stats.stream)
                surplus -= 1
        return surplus > 0

    async def _open(self, number: int) -> bool:
        link = self._link
        sock: CountedSocket | None = None
        try:
            async with asyncio.timeout(self._patience()):
                if link.opener is not None:
                    sock = await link.opener()
                else:
                    sock = await wire.dial(*link.address, self._carried.socket)
                    guard(sock)
                sock.peer = link.peer_id
                hello = proofs.stream_hello(link.secret, number)
                await wire.send(sock, handshake.preamble(handshake.DATA, link.party) + handshake.pack(hello))
                raw = await wire.receive(sock, handshake.PREAMBLE_BYTES)
                handshake.parse_preamble(raw, link.party)
                answer = await wire.receive_message(sock)
                handshake.raise_refusal(answer)
                proofs.check_stream_answer(link.secret, hello, answer)
            if link.closed:
                raise asyncio.CancelledError
        except (OSError, TimeoutError, P2PAvgError, handshake.Refusal) as error:
            logger.debug("no data stream to %s: %s", short_id(link.peer_id), error)
            if sock is not None:
                sock.close()
            return False
        except asyncio.CancelledError:
            if sock is not None:
                sock.close()
            raise
        keys = proofs.stream_keys(link.secret, hello, answer, dialled=True) if link.sealed else None
        sock.hand_over()
        self._engine.attach(link.id, number, sock, keys)
        self._opened_at = time.monotonic()
        if not link.ready.done():
            link.ready.set_result(None)
        return True


async def accept_stream(
    sock: CountedSocket,
    links: Mapping[bytes, Link],
    engine: Engine,
    party: Party,
    admits: Callable[[Link], bool],
) -> None:
    """Accept a data stream that the other side opens. links: by tag. admits: whether a link may have another.

    Raises ProtocolError, UnreachableError, OSError.
    """
    try:
        hello = await wire.receive_message(sock)
        tag = hello.get("link")
        link = links.get(tag) if isinstance(tag, bytes) else None
        if link is None or link.dialled:
            raise ProtocolError("a data stream of an unknown link")
        answer = proofs.stream_answer(link.secret, hello)
        sock.peer = link.peer_id
        link.first_use(hello["nonce"])  # first: hellos travel in the clear, and others may repeat them
        if not admits(link):
            raise ProtocolError("data streams are opened too fast; the other side tries again")
        await wire.send(sock, handshake.preamble(handshake.DATA, party) + handshake.pack(answer))
        streams = engine.streams(link.id)
        if link.closed or hello["stream"] in streams or len(streams) >= MOST_ACCEPTED:
            raise ProtocolError("a data stream too many")
    except BaseException:
        sock.close()
        raise
    keys = proofs.stream_keys(link.secret, hello, answer, dialled=False) if link.sealed else None
    sock.hand_over()
    engine.attach(link.id, hello["stream"], sock, keys)
    if not link.ready.done():
        link.ready.set_result(None)
