"""A relay: joins two connections of members that have no way to each other, within a cap.

It passes on bytes as they come and knows nothing of them: the two have encrypted them for each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pavg.errors import ProtocolError
from p2pavg.transport.links import handshake
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.carried import CountedSocket
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.ways.turns import Turns

logger = logging.getLogger("p2pavg.transport")

TOKEN_BYTES = 16
MOST_TUNNELS = 128
MOST_OF_ONE = 32  # tunnels that end at one peer
CLAIM_S = 10.0  # how long a tunnel waits for its two ends
_RATE_AGE_S = 1.0


@dataclass(eq=False)
class _Tunnel:
    peers: tuple[bytes, bytes]
    tokens: tuple[bytes, bytes]
    ends: dict[bytes, CountedSocket] = field(default_factory=dict)  # by token
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    flows: list[_Flow] = field(default_factory=list)
    expiry: asyncio.TimerHandle | None = None
    closed: bool = False

    @property
    def pair(self) -> frozenset[bytes]:
        return frozenset(self.peers)


@dataclass(eq=False)
class _Flow:
    """One direction of a tunnel."""

    tunnel: _Tunnel
    source: CountedSocket
    sink: CountedSocket
    pending: memoryview = field(default_factory=lambda: memoryview(b""))


class Relay:
    """On the loop thread. The endpoint gives it the connections whose ends name a token."""

    def __init__(self, party: Party, bytes_per_second: Callable[[], float]) -> None:
        """bytes_per_second: the cap on what is passed on, both directions of all tunnels together."""
        self._party = party
        self._rate = bytes_per_second
        self._rate_at = -_RATE_AGE_S
        self._loop = asyncio.get_running_loop()
        self._tunnels: dict[bytes, _Tunnel] = {}  # by either token
        self._of: Counter[bytes] = Counter()
        self._turns: Turns[_Flow] = Turns()
        self._timer: asyncio.TimerHandle | None = None
        self.passed_on = 0  # bytes, since the beginning
        self.pairs: Counter[frozenset[bytes]] = Counter()  # tunnels that are open, by whom they join

    def close(self) -> None:
        """All tunnels end."""
        for tunnel in set(self._tunnels.values()):
            self._end(tunnel)
        if self._timer is not None:
            self._timer.cancel()

    def make_room(self, one: bytes, other: bytes) -> bool:
        """Whether one more tunnel between these two may be opened. Where there is no room, the pair that has
        most tunnels loses its last one to a pair with two fewer: nobody holds all ways to a peer.
        """
        pair = frozenset((one, other))
        while (crowd := self._crowd(pair)) is not None:
            most = max(crowd, key=lambda tunnel: self.pairs[tunnel.pair]).pair
            if self.pairs[most] <= self.pairs[pair] + 1:
                return False
            self._end(next(tunnel for tunnel in reversed(crowd) if tunnel.pair == most))
        return True

    def _crowd(self, pair: frozenset[bytes]) -> list[_Tunnel] | None:
        """The tunnels, oldest first, among which one more between these two is too many; None: it is not."""
        tunnels = list(dict.fromkeys(self._tunnels.values()))
        for peer in pair:
            if self._of[peer] >= MOST_OF_ONE:
                return [tunnel for tunnel in tunnels if peer in tunnel.peers]
        return tunnels if len(tunnels) >= MOST_TUNNELS else None

    def open(self, one: bytes, other: bytes) -> tuple[bytes, bytes]:
        """A tunnel between two peers: the tokens with which each claims its end."""
        tokens = os.urandom(TOKEN_BYTES), os.urandom(TOKEN_BYTES)
        tunnel = _Tunnel((one, other), tokens)
        for token, peer in zip(tokens, tunnel.peers, strict=True):
            self._tunnels[token] = tunnel
            self._of[peer] += 1
        self.pairs[tunnel.pair] += 1
        tunnel.expiry = self._loop.call_later(CLAIM_S, self._end, tunnel)
        return tokens

    def forget(self, peer: bytes) -> None:
        """It is no member any more, or has no link to us: its tunnels end."""
        for tunnel in set(self._tunnels.values()):
            if peer in tunnel.peers:
                self._end(tunnel)

    async def claim(self, sock: CountedSocket) -> None:
        """A connection that is one end of a tunnel. Raises ProtocolError, UnreachableError, OSError."""
        hello = await wire.receive_message(sock)
        token = hello.get("token")
        tunnel = self._tunnels.get(token) if isinstance(token, bytes) else None
        if tunnel is None or not isinstance(token, bytes) or token in tunnel.ends:
            raise ProtocolError("an end of a tunnel that nobody asked for")
        sock.peer = tunnel.peers[tunnel.tokens.index(token)]
        wire.keep_alive(sock)
        tunnel.ends[token] = sock
        if len(tunnel.ends) < 2:
            try:
                await tunnel.joined.wait()
            except asyncio.CancelledError:  # the connection was cut, as one of too many
                self._end(tunnel)
                raise
        else:
            self._join(tunnel)
        if tunnel.closed:
            raise ProtocolError("the other end of the tunnel did not come")

    def _join(self, tunnel: _Tunnel) -> None:
        if tunnel.expiry is not None:
            tunnel.expiry.cancel()
        one, other = (tunnel.ends[token] for token in tunnel.tokens)
        answer = handshake.preamble(handshake.TUNNEL, self._party) + handshake.pack({"ok": True})
        tunnel.flows = [_Flow(tunnel, one, other), _Flow(tunnel, other, one)]
        for flow in tunnel.flows:
            flow.pending = memoryview(answer)
            self._write(flow)
        tunnel.joined.set()

    def _end(self, tunnel: _Tunnel) -> None:
        if tunnel.closed:
            return
        tunnel.closed = True
        if tunnel.expiry is not None:
            tunnel.expiry.cancel()
        for flow in tunnel.flows:
            self._turns.leave(flow)
        for sock in tunnel.ends.values():
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
                self._loop.remove_writer(sock.fileno())
                sock.close()
        for token, peer in zip(tunnel.tokens, tunnel.peers, strict=True):
            self._tunnels.pop(token, None)
            self._of -= Counter([peer])
        self.pairs -= Counter([tunnel.pair])
        tunnel.joined.set()

    # -- bytes

    def _listen(self, flow: _Flow) -> None:
        self._loop.add_reader(flow.source.fileno(), self._readable, flow)

    def _readable(self, flow: _Flow) -> None:
        self._loop.remove_reader(flow.source.fileno())
        self._turns.ask(flow)
        self._serve()

    def _serve(self) -> None:
        """Give turns as long as the cap allows."""
        now = time.monotonic()
        if now - self._rate_at >= _RATE_AGE_S:
            self._rate_at = now
            self._turns.limit(max(1.0, self._rate()), now)
        while (flow := self._turns.next(now)) is not None:
            self._pass_on(flow)
        if len(self._turns) and self._timer is None:
            self._timer = self._loop.call_later(self._turns.wait_s(now), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._serve()

    def _pass_on(self, flow: _Flow) -> None:
        try:
            data = flow.source.recv(self._turns.turn_bytes)
        except (BlockingIOError, InterruptedError):
            self._listen(flow)
            return
        except OSError:
            data = b""
        if not data:
            self._end(flow.tunnel)
            return
        self._turns.spend(len(data))
        self.passed_on += len(data)
        flow.pending = memoryview(data)
        self._write(flow)

    def _write(self, flow: _Flow) -> None:
        """What is pending; then listen for more."""
        try:
            sent = flow.sink.send(flow.pending)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._end(flow.tunnel)
            return
        flow.pending = flow.pending[sent:]
        descriptor = flow.sink.fileno()
        if flow.pending:
            self._loop.add_writer(descriptor, self._write, flow)
        else:
            self._loop.remove_writer(descriptor)
            self._listen(flow)


async def enter(sock: CountedSocket, token: bytes, party: Party) -> None:
    """Claim one end of a tunnel at a relay, over a connection to it, and wait for the other end.

    Raises ProtocolError, UnreachableError, Refusal, OSError.
    """
    hello = handshake.preamble(handshake.TUNNEL, party) + handshake.pack({"token": token})
    await wire.send(sock, hello)
    handshake.parse_preamble(await wire.receive(sock, handshake.PREAMBLE_BYTES), party)
    answer = await wire.receive_message(sock)
    handshake.raise_refusal(answer)
    if answer.get("ok") is not True:
        raise ProtocolError("a relay that does not answer")
