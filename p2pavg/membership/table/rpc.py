"""Requests and answers over one UDP socket: retries, proofs of identity, and nothing for addresses that have
not shown that they receive beyond a small multiple of what came.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from p2pavg.identity import Identity, peer_id_of, verify
from p2pavg.membership.table.address import Address, normalise, pack_address
from p2pavg.membership.table.beat import BEAT_MARK
from p2pavg.membership.table.ledger import AMPLIFICATION, Ledger
from p2pavg.membership.table.serving import BEAT_WORK, Server, Service
from p2pavg.membership.table.timing import LONGEST_TIMEOUT, Endpoints
from p2pavg.membership.table.wire import (
    FLAGS_OFFSET,
    HEADER_BYTES,
    MAX_DATAGRAM,
    NO_TOKEN,
    NOTICE,
    TOKEN_BYTES,
    TOKEN_OFFSET,
    TRANSACTION_BYTES,
    TRY_SHIFT,
    VERSION,
    Contact,
    Flag,
    Head,
    Kind,
    Message,
    decode,
    encode,
    other_version,
    read_head,
)

logger = logging.getLogger("p2pavg.membership")

TRIES = 4
BACKOFF = 1.5
MAX_LATE = 1024
OPENED = (Kind.STORE, Kind.FETCH, Kind.DIAL, Kind.REVOKED)  # asked once the other side has given a token

Answer = Callable[[Message | None], None]


class _Pending:
    __slots__ = (
        "address",
        "asked",
        "cookie",
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
        self.asked = pack_address(address)
        self.cookie = False  # whether a token alone came back already
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
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.DatagramTransport | None = None
        self._pending: dict[bytes, _Pending] = {}
        self._late: OrderedDict[bytes, _Pending] = (
            OrderedDict()
        )  # given up, but an answer still tells the RTT
        self.ledger = Ledger(clock)
        self._endpoints = Endpoints()
        self._ipv6 = False
        self._closed = False
        self._complained: set[str] = set()
        self._server = Server(identity, service, self.ledger, self._send, clock)

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self._ipv6 = len(transport.get_extra_info("sockname")) == 4

    def error_received(self, exc: Exception) -> None:
        logger.debug("datagram not delivered: %s", exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self.bytes_received += len(data)
        address = normalise(addr)
        self.ledger.told(address, len(data))
        if data[:1] == BEAT_MARK:
            if self._server.admits(address, BEAT_WORK):
                self._service.handle_beat(data, address)
            return
        head = read_head(data)
        if head is None:
            self._other(data, address)
        elif head.flags & Flag.ANSWER:
            if head.transaction in self._pending or head.transaction in self._late:
                self._answered(data, head, address)
        else:
            self._server.requested(data, head, address)

    def _other(self, data: bytes, address: Address) -> None:
        """No message of ours. Whoever speaks another version is told so, briefly, and we remember it."""
        version = other_version(data)
        if version is None:
            self._complain_once(address, "is no message of the table")
            return
        self.other_version = version
        self._complain_once(address, f"is of version {version} of the table, and this is version {VERSION}")
        if len(data) > HEADER_BYTES and self._server.admits(address):
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
        prove: bool = False,
    ) -> None:
        """Ask the node at `address`; `on_answer` is called once, with None when it did not answer.

        `expected` is the id that must answer; a node whose identity was not proven before proves it now, and
        with `prove` each does.
        `on_slow` is called when the answer takes longer than answers from there usually do, so that callers
        can go on elsewhere.
        """
        if self._closed:
            self._loop.call_soon(on_answer, None)
            return
        transaction = os.urandom(TRANSACTION_BYTES)
        endpoint = self._endpoints.at(address)
        flags = Flag.CLIENT_ONLY if self.client_only else 0
        proves = prove or expected is None or not self.ledger.is_home(address, expected)
        asked = pack_address(address) if proves else b""
        flags |= Flag.PROVE if proves else 0
        me = self.identity.peer_id
        data = encode(kind, flags, transaction, me, endpoint.token, body, asked=asked)
        too_long = kind in OPENED or self.ledger.room(address) < len(data)
        if too_long and endpoint.token == NO_TOKEN and kind != Kind.PING:
            self._open(address, kind, body, on_answer, expected, on_slow, tries)
            return
        pending = _Pending(address, data, expected, on_answer, on_slow)
        pending.timeout = self._endpoints.timeout(endpoint)
        pending.tries = TRIES - tries
        self._pending[transaction] = pending
        self._transmit(transaction)
        if on_slow is not None:
            pending.slow_timer = self._loop.call_later(self._endpoints.patience(endpoint), on_slow)

    def _open(
        self,
        address: Address,
        kind: int,
        body: list[Any],
        on_answer: Answer,
        expected: bytes | None,
        on_slow: Callable[[], None] | None,
        tries: int,
    ) -> None:
        """Get a token first, with a short message: an address may be anybody's before it answers."""
        was_slow = False

        def slow() -> None:
            nonlocal was_slow
            if not was_slow and on_slow is not None:
                was_slow = True
                on_slow()

        def opened(message: Message | None) -> None:
            if message is None or self._endpoints.at(address).token == NO_TOKEN:
                on_answer(None)
                return
            who = message.sender if expected is None else expected
            self.call(address, kind, body, on_answer, expected=who, on_slow=slow, tries=tries)

        self.call(address, Kind.PING, [], opened, expected=expected, on_slow=slow, tries=tries)

    async def ask(
        self,
        address: Address,
        kind: int,
        body: list[Any],
        *,
        expected: bytes | None = None,
        on_slow: Callable[[], None] | None = None,
        tries: int = TRIES,
        prove: bool = False,
    ) -> Message | None:
        """`call` for coroutines."""
        future: asyncio.Future[Message | None] = self._loop.create_future()

        def settle(message: Message | None) -> None:
            if not future.done():
                future.set_result(message)

        self.call(address, kind, body, settle, expected=expected, on_slow=on_slow, tries=tries, prove=prove)
        return await future

    def send_beat(self, data: bytes, address: Address) -> None:
        """One datagram that asks for no answer."""
        self._send(data, address)

    def is_proven(self, peer_id: bytes, address: Address) -> bool:
        """Whether the node at `address` has proven that it holds the key of `peer_id`."""
        return self.ledger.is_home(address, peer_id)

    def has_token(self, address: Address) -> bool:
        """Whether what is asked there now is served at once."""
        return self._endpoints.at(address).token != NO_TOKEN

    def token_from(self, address: Address) -> bytes:
        """What the node at `address` gave, to be shown with each request."""
        return self._endpoints.at(address).token

    def token_for(self, address: Address) -> bytes:
        """What only who receives at `address` can show."""
        return self._server.token_for(address)

    def rtt(self, address: Address) -> float | None:
        """The smoothed round-trip time to an address in seconds, when known."""
        return self._endpoints.rtt(address)

    def _transmit(self, transaction: bytes) -> None:
        pending = self._pending[transaction]
        endpoint = self._endpoints.at(pending.address)
        if pending.tries >= TRIES:
            self._late[transaction] = pending
            if len(self._late) > MAX_LATE:
                self._late.popitem(last=False)
            endpoint.token = NO_TOKEN  # it may have restarted and forgotten its secret
            self._give_up(transaction)
            return
        pending.data[FLAGS_OFFSET] = pending.data[FLAGS_OFFSET] & ~Flag.TRY | pending.tries << TRY_SHIFT
        data = bytes(pending.data)
        if endpoint.token == NO_TOKEN and pending.data[3] != Kind.PING:  # whose answer is short
            wanted = int(min(MAX_DATAGRAM // AMPLIFICATION, self.ledger.room(pending.address)))
            data = data.ljust(wanted, b"\x00")
        if self._send(data, pending.address):
            pending.sent[pending.tries] = self._clock()
        pending.tries += 1
        pending.timer = self._loop.call_later(pending.timeout, self._transmit, transaction)
        pending.timeout = min(pending.timeout * BACKOFF, LONGEST_TIMEOUT)

    def _answered(self, data: bytes, head: Head, address: Address) -> None:
        pending = self._pending.get(head.transaction) or self._late[head.transaction]
        if pack_address(address) != pending.asked:
            self._complain_once(address, "answers a question that went to another address")
            return
        message = decode(data)
        if message is None:
            return
        if head.flags & Flag.COOKIE:
            self._answered_by_cookie(pending, head)
            return
        late = self._late.pop(head.transaction, None)
        if pending.expected is not None and message.sender != pending.expected:
            self._give_up(message.transaction)
            return
        contact = Contact(message.sender, pending.address)
        if message.flags & Flag.PROOF or not self.ledger.is_home(contact.address, contact.id):
            if not self._is_proof(message, pending.asked):
                self._give_up(message.transaction)
                return
            self.ledger.proved(contact.address, contact.id)
        endpoint = self._endpoints.at(pending.address)
        endpoint.token = message.token
        sent = pending.sent.get((message.flags & Flag.TRY) >> TRY_SHIFT)
        if sent is not None:
            self._endpoints.measured(endpoint, self._clock() - sent)
        if late is not None:
            self._service.heard_late(contact)
            return
        del self._pending[message.transaction]
        pending.cancel_timers()
        pending.on_answer(message)

    def _answered_by_cookie(self, pending: _Pending, head: Head) -> None:
        """The node there is busy, and serves who shows that it receives: ask again, with the token."""
        if pending.cookie or head.transaction not in self._pending:
            return
        pending.cookie = True
        self.ledger.proved(pending.address)
        self._endpoints.at(pending.address).token = head.token
        pending.data[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = head.token
        if pending.timer is not None:
            pending.timer.cancel()
        pending.tries = max(0, pending.tries - 1)
        self._transmit(head.transaction)

    def _give_up(self, transaction: bytes) -> None:
        """Somebody else lives at the address now: no use in asking again."""
        pending = self._pending.pop(transaction, None)
        if pending is not None:
            pending.cancel_timers()
            pending.on_answer(None)

    def _is_proof(self, message: Message, asked: bytes) -> bool:
        public_key, signature = message.proof[:32], message.proof[32:]
        signed = message.to_prove(asked, self.identity.peer_id)
        return peer_id_of(public_key) == message.sender and verify(public_key, signed, signature)

    # the rest

    def _send(self, data: bytes, address: Address) -> bool:
        """Whether it went: not to an address that has not shown that it receives and has had its share."""
        assert self._transport is not None
        host, port = address
        if ":" not in host:
            host = f"::ffff:{host}" if self._ipv6 else host
        elif not self._ipv6:
            return False  # this node has no IPv6 socket
        if self._transport.is_closing() or not self.ledger.spend(address, len(data)):
            return False
        self.bytes_sent += len(data)
        self._transport.sendto(data, (host, port))
        return True

    def _complain_once(self, address: Address, what: str) -> None:
        if address[0] not in self._complained and len(self._complained) < 256:
            self._complained.add(address[0])
            logger.info("ignored a datagram from %s: it %s", address[0], what)
