"""Requests and answers over one UDP socket: adaptive timeouts, retries, proofs of identity, bounded
amplification.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol, cast

from p2pavg.identity import Identity, peer_id_of, verify
from p2pavg.membership.table.address import Address, normalise, pack_address
from p2pavg.membership.table.beat import BEAT_MARK
from p2pavg.membership.table.throttle import Throttle
from p2pavg.membership.table.wire import (
    AMPLIFICATION,
    FLAGS_OFFSET,
    HEADER_BYTES,
    MAX_DATAGRAM,
    NO_TOKEN,
    NOTICE,
    TOKEN_BYTES,
    TRANSACTION_BYTES,
    TRY_SHIFT,
    VERSION,
    Contact,
    Flag,
    Message,
    decode,
    encode,
    other_version,
)
from p2pavg.networks import source_of

logger = logging.getLogger("p2pavg.membership")

TRIES = 4
BACKOFF = 1.5
FIRST_TIMEOUT = 0.4
SHORTEST_TIMEOUT = 0.12
SHORTEST_PATIENCE = 0.04
LONGEST_TIMEOUT = 5.0
MAX_ENDPOINTS = 8192
MAX_LATE = 1024
REQUESTS_PER_S, REQUESTS_AT_ONCE = 500.0, 1000.0  # of one sender
BEAT_WORK = 0.25  # of a request
_PROOF_DOMAIN = b"p2pavg dht proof\x00"

Answer = Callable[[Message | None], None]


class Endpoint:
    """What is known about one address: its token for us and its round-trip time (RFC 6298 estimator,
    seconds).
    """

    __slots__ = ("deviation", "smoothed", "token")

    def __init__(self) -> None:
        self.token = NO_TOKEN
        self.smoothed: float | None = None
        self.deviation = 0.0

    def measured(self, rtt: float) -> None:
        if self.smoothed is None:
            self.smoothed, self.deviation = rtt, rtt / 2
        else:
            self.deviation += (abs(rtt - self.smoothed) - self.deviation) / 4
            self.smoothed += (rtt - self.smoothed) / 8


class _Pending:
    __slots__ = (
        "address",
        "data",
        "expected",
        "on_answer",
        "on_slow",
        "sent",
        "slow_timer",
        "timeout",
        "timer",
        "tries",
    )

    def __init__(
        self,
        address: Address,
        data: bytes,
        expected: bytes | None,
        on_answer: Answer,
        on_slow: Callable[[], None] | None,
    ) -> None:
        self.address = address
        self.data = bytearray(data)
        self.expected = expected
        self.on_answer = on_answer
        self.on_slow = on_slow
        self.tries = 0
        self.timeout = 0.0
        self.sent: dict[int, float] = {}  # try -> when
        self.timer: asyncio.TimerHandle | None = None
        self.slow_timer: asyncio.TimerHandle | None = None

    def cancel_timers(self) -> None:
        for timer in (self.timer, self.slow_timer):
            if timer is not None:
                timer.cancel()


class Service(Protocol):
    """Answers requests. Returns the body of the answer, or None to stay silent."""

    def handle(self, message: Message, address: Address, returnable: bool, room: int) -> list[Any] | None: ...

    def handle_beat(self, data: bytes, address: Address) -> None: ...

    def heard_late(self, contact: Contact) -> None: ...


class Rpc(asyncio.DatagramProtocol):
    """One node's socket. All methods belong to the event loop's thread."""

    def __init__(
        self, identity: Identity, service: Service, *, client_only: bool, clock: Callable[[], float]
    ) -> None:
        self.identity = identity
        self.client_only = client_only
        self.other_version: int | None = None  # that a node of another version was heard to speak
        self.bytes_sent = 0
        self.bytes_received = 0
        self._service = service
        self._secret = os.urandom(32)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.DatagramTransport | None = None
        self._pending: dict[bytes, _Pending] = {}
        self._late: OrderedDict[bytes, _Pending] = (
            OrderedDict()
        )  # given up, but an answer still tells the RTT
        self._endpoints: OrderedDict[Address, Endpoint] = OrderedDict()
        self._recent_rtts: deque[float] = deque(maxlen=32)
        self._proven: OrderedDict[tuple[bytes, Address], None] = OrderedDict()
        self._ipv6 = False
        self._closed = False
        self._complained: set[str] = set()
        self._throttle = Throttle(rate=REQUESTS_PER_S, burst=REQUESTS_AT_ONCE)

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._ipv6 = len(transport.get_extra_info("sockname")) == 4

    def error_received(self, exc: Exception) -> None:
        logger.debug("datagram not delivered: %s", exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.bytes_received += len(data)
        address = normalise(addr)
        if data[:1] == BEAT_MARK:
            if self._admits(address, BEAT_WORK):
                self._service.handle_beat(data, address)
            return
        message = decode(data)
        if message is None:
            self._other(data, address)
        elif message.flags & Flag.ANSWER:
            self._answered(message, address)
        elif self._admits(address):
            self._requested(message, address, len(data))

    def _admits(self, address: Address, work: float = 1.0) -> bool:
        """Whether to work for what came from there."""
        return self._throttle.admits(source_of(address[0]), self._clock(), work)

    def _other(self, data: bytes, address: Address) -> None:
        """No message of ours. Whoever speaks another version is told so, briefly, and we remember it."""
        version = other_version(data)
        if version is None:
            self._complain_once(address, "is no message of the table")
            return
        self.other_version = version
        self._complain_once(address, f"is of version {version} of the table, and this is version {VERSION}")
        if len(data) > HEADER_BYTES and self._admits(address):
            self._send(NOTICE, address)

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()
        for transaction in tuple(self._pending):
            self._give_up(transaction)

    # asking

    def call(
        self,
        address: Address,
        kind: int,
        body: list[Any],
        on_answer: Answer,
        *,
        expected: bytes | None = None,
        on_slow: Callable[[], None] | None = None,
        tries: int = TRIES,
    ) -> None:
        """Ask the node at `address`; `on_answer` is called once, with None when it did not answer.

        `expected` is the id that must answer; a node whose identity was not proven before proves it now.
        `on_slow` is called when the answer takes longer than answers from there usually do, so that callers
        can go on elsewhere.
        """
        if self._closed:
            self._loop.call_soon(on_answer, None)
            return
        transaction = os.urandom(TRANSACTION_BYTES)
        endpoint = self._endpoint(address)
        flags = Flag.CLIENT_ONLY if self.client_only else 0
        if expected is None or (expected, address) not in self._proven:
            flags |= Flag.PROVE
        data = encode(
            kind,
            flags,
            transaction,
            self.identity.peer_id,
            endpoint.token,
            body,
            pad_to=MAX_DATAGRAM // AMPLIFICATION if endpoint.token == NO_TOKEN else 0,
        )
        pending = _Pending(address, data, expected, on_answer, on_slow)
        pending.timeout = self._timeout(endpoint)
        pending.tries = TRIES - tries
        self._pending[transaction] = pending
        self._transmit(transaction)
        if on_slow is not None:
            pending.slow_timer = self._loop.call_later(self._patience(endpoint), on_slow)

    async def ask(
        self,
        address: Address,
        kind: int,
        body: list[Any],
        *,
        expected: bytes | None = None,
        on_slow: Callable[[], None] | None = None,
        tries: int = TRIES,
    ) -> Message | None:
        """`call` for coroutines."""
        future: asyncio.Future[Message | None] = self._loop.create_future()

        def settle(message: Message | None) -> None:
            if not future.done():
                future.set_result(message)

        self.call(address, kind, body, settle, expected=expected, on_slow=on_slow, tries=tries)
        return await future

    def send_beat(self, data: bytes, address: Address) -> None:
        """One datagram that asks for no answer."""
        self._send(data, address)

    def is_proven(self, peer_id: bytes, address: Address) -> bool:
        """Whether the node at `address` has proven that it holds the key of `peer_id`."""
        return (peer_id, address) in self._proven

    def rtt(self, address: Address) -> float | None:
        """The smoothed round-trip time to an address in seconds, when known."""
        endpoint = self._endpoints.get(address)
        return endpoint.smoothed if endpoint else None

    def _transmit(self, transaction: bytes) -> None:
        pending = self._pending[transaction]
        if pending.tries >= TRIES:
            self._late[transaction] = pending
            if len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
            self._endpoint(pending.address).token = NO_TOKEN  # it may have restarted and forgotten its secret
            self._give_up(transaction)
            return
        pending.sent[pending.tries] = self._clock()
        pending.data[FLAGS_OFFSET] = pending.data[FLAGS_OFFSET] & ~Flag.TRY | pending.tries << TRY_SHIFT
        self._send(bytes(pending.data), pending.address)
        pending.tries += 1
        pending.timer = self._loop.call_later(pending.timeout, self._transmit, transaction)
        pending.timeout = min(pending.timeout * BACKOFF, LONGEST_TIMEOUT)

    def _answered(self, message: Message, address: Address) -> None:
        late = self._late.pop(message.transaction, None)
        pending = late or self._pending.get(message.transaction)
        if pending is None:
            return
        if pending.expected is not None and message.sender != pending.expected:
            self._give_up(message.transaction)
            return
        contact = (message.sender, pending.address)
        if contact not in self._proven:
            if not self._is_proof(message):
                self._give_up(message.transaction)
                return
            self._proven[contact] = None
            if len(self._proven) > MAX_ENDPOINTS:
                self._proven.popitem(last=False)
        endpoint = self._endpoint(pending.address)
        endpoint.token = message.token
        sent = pending.sent.get((message.flags & Flag.TRY) >> TRY_SHIFT)
        if sent is not None:
            rtt = self._clock() - sent
            endpoint.measured(rtt)
            self._recent_rtts.append(rtt)
        if late is not None:
            self._service.heard_late(Contact(*contact))
            return
        del self._pending[message.transaction]
        pending.cancel_timers()
        pending.on_answer(message)

    def _give_up(self, transaction: bytes) -> None:
        """Somebody else lives at the address now: no use in asking again."""
        pending = self._pending.pop(transaction, None)
        if pending is not None:
            pending.cancel_timers()
            pending.on_answer(None)

    def _is_proof(self, message: Message) -> bool:
        public_key, signature = message.proof[:32], message.proof[32:]
        signed = _PROOF_DOMAIN + message.transaction + self.identity.peer_id
        return peer_id_of(public_key) == message.sender and verify(public_key, signed, signature)

    # answering

    def _requested(self, message: Message, address: Address, size: int) -> None:
        returnable = message.token == self._token(address)
        limit = MAX_DATAGRAM if returnable else min(MAX_DATAGRAM, AMPLIFICATION * size)
        proof = b""
        flags = Flag.ANSWER | message.flags & Flag.TRY
        if message.flags & Flag.PROVE:
            signed = _PROOF_DOMAIN + message.transaction + message.sender
            proof = self.identity.public_key + self.identity.sign(signed)
            flags |= Flag.PROOF
        body = self._service.handle(message, address, returnable, limit - 160)
        if body is None:
            return
        data = encode(
            message.kind,
            flags,
            message.transaction,
            self.identity.peer_id,
            self._token(address),
            body,
            proof=proof,
        )
        if len(data) <= limit:
            self._send(data, address)

    def _token(self, address: Address) -> bytes:
        return hashlib.blake2b(pack_address(address), key=self._secret, digest_size=TOKEN_BYTES).digest()

    # the rest

    def _send(self, data: bytes, address: Address) -> None:
        assert self._transport is not None
        host, port = address
        if ":" not in host:
            host = f"::ffff:{host}" if self._ipv6 else host
        elif not self._ipv6:
            return  # this node has no IPv6 socket
        if not self._transport.is_closing():
            self.bytes_sent += len(data)
            self._transport.sendto(data, (host, port))

    def _endpoint(self, address: Address) -> Endpoint:
        endpoint = self._endpoints.get(address)
        if endpoint is None:
            endpoint = self._endpoints[address] = Endpoint()
            if len(self._endpoints) > MAX_ENDPOINTS:
                self._endpoints.popitem(last=False)
        else:
            self._endpoints.move_to_end(address)
        return endpoint

    def _patience(self, endpoint: Endpoint) -> float:
        """How long an answer from there usually takes at most, in seconds."""
        if endpoint.smoothed is not None:
            usual = endpoint.smoothed + 4 * endpoint.deviation + 0.01
        elif len(self._recent_rtts) >= 4:
            usual = 4 * statistics.median(self._recent_rtts)
        else:
            usual = FIRST_TIMEOUT / 2
        return min(max(usual, SHORTEST_PATIENCE), LONGEST_TIMEOUT / 2)

    def _timeout(self, endpoint: Endpoint) -> float:
        return min(max(2 * self._patience(endpoint), SHORTEST_TIMEOUT), LONGEST_TIMEOUT)

    def _complain_once(self, address: Address, what: str) -> None:
        if address[0] not in self._complained and len(self._complained) < 256:
            self._complained.add(address[0])
            logger.info("ignored a datagram from %s: it %s", address[0], what)
