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
from p2pavg.membership.table.beat import BEAT_BYTES, BEAT_MARK
from p2pavg.membership.table.carrying.carrier import Carrier
from p2pavg.membership.table.carrying.streams import Write
from p2pavg.membership.table.ledger import AMPLIFICATION, AddressLedger
from p2pavg.membership.table.questions import Answer, Pending, Question, once
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
    Message,
    RequestKind,
    decode,
    encode,
    other_version,
    read_head,
)

logger = logging.getLogger("p2pavg.membership")

TRIES = 4
BACKOFF = 1.5
MAX_LATE = 1024
FIND_BYTES = 480  # of the longest answer to a lookup
# These are asked once the other side has given a token.
OPENED = (RequestKind.STORE, RequestKind.FETCH, RequestKind.DIAL, RequestKind.REVOKED)
ROOM: dict[int, int] = {
    RequestKind.FIND: 120,
    RequestKind.INDEX: 180,
    RequestKind.ENTRIES: 400,
    RequestKind.REFRESH: 120,
}  # else these as well


class Rpc(asyncio.DatagramProtocol):
    """One node's socket. All methods belong to the event loop's thread."""

    def __init__(
        self, identity: Identity, service: Service, *, client_only: bool, clock: Callable[[], float]
    ) -> None:
        self.identity = identity
        self.client_only = client_only
        self.other_version: int | None = None  # that a node of another version was heard to speak
        self._service = service
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pending: dict[bytes, Pending] = {}
        self._first: dict[
            Address, list[tuple[Question, asyncio.TimerHandle | None]]
        ] = {}  # questions that wait for the first answer from there
        self._late: OrderedDict[bytes, Pending] = OrderedDict()  # given up, but an answer still tells the RTT
        self.ledger = AddressLedger(clock)
        self._endpoints = Endpoints()
        self._closed = False
        self._complained: set[str] = set()
        self.carrier = Carrier(self.ledger, clock)
        self._server = Server(identity, service, self.ledger, clock)

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.carrier.opened(cast(asyncio.DatagramTransport, transport))

    def error_received(self, exc: Exception) -> None:
        logger.debug("datagram not delivered: %s", exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        address = normalise(addr)
        self.carrier.received(data, addr[0], by_tcp=False)
        self.carrier.ways.heard()
        self._received(data, address, None)

    def stream_received(self, data: bytes, address: Address, write: Write, dialled: bool) -> None:
        """A datagram came over a TCP connection with `address`, which is answered by `write`."""
        self.carrier.received(data, address[0], by_tcp=True)
        if not dialled and data[:1] == BEAT_MARK:
            self.carrier.ways.tells_by_tcp(address)
        self._received(data, address, write)

    def _received(self, data: bytes, address: Address, write: Write | None) -> None:
        self.ledger.told(address, len(data))
        if data[:1] == BEAT_MARK:
            if self._server.admits(address, BEAT_WORK * len(data) / BEAT_BYTES):
                self._service.handle_beat(data, address)
            return
        head = read_head(data)
        if head is None:
            self._other(data, address)
        elif head.flags & Flag.ANSWER:
            if write is None:
                self.carrier.answered_by_udp(head.transaction, address)
            if head.transaction in self._pending or head.transaction in self._late:
                self._answered(data, head, address, by_tcp=write is not None)
        elif write is not None:
            self._server.requested(data, head, address, write, verified=True)
        else:
            self._server.requested(data, head, address, lambda answer: self.carrier.send(answer, address))

    def _other(self, data: bytes, address: Address) -> None:
        """No message of ours. Whoever speaks another version is told so, briefly, and we remember it."""
        version = other_version(data)
        if version is None:
            self._complainonce(address, "is no message of the table")
            return
        self.other_version = version
        self._complainonce(address, f"is of version {version} of the table, and this is version {VERSION}")
        if len(data) > HEADER_BYTES and self._server.admits(address):
            self.carrier.send(NOTICE, address)

    def close(self) -> None:
        self._closed = True
        self.carrier.close()
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
        self._put(Question(address, kind, body, on_answer, expected, once(on_slow), tries, prove))

    def _put(self, question: Question) -> None:
        address, expected, on_slow = question.address, question.expected, question.on_slow
        if self._closed:
            self._loop.call_soon(question.on_answer, None)
            return
        endpoint, proved = self._endpoints.at(address), self.ledger.is_proved(address)
        slow_timer: asyncio.TimerHandle | None = None
        if on_slow is not None:
            slow_timer = self._loop.call_later(self._endpoints.patience(endpoint), on_slow)
        if not proved and address in self._first:  # one at a time to who may not be there
            self._first[address].append((question, slow_timer))
            return
        proves = question.prove or expected is None or not self.ledger.is_home(address, expected)
        asked = pack_address(address) if proves else b""
        flags = (Flag.CLIENT_ONLY if self.client_only else 0) | (Flag.PROVE if proves else 0)
        opens = question.kind in OPENED or self.ledger.room(address) < ROOM.get(question.kind, 0)
        transaction, me = os.urandom(TRANSACTION_BYTES), self.identity.peer_id
        pending = Pending(question, slow_timer)
        kind, body = question.kind, question.body
        if opens and endpoint.token == NO_TOKEN:
            # get a token first, with a short message: an address may be anybody's before it answers
            pending.opens, kind, body = True, RequestKind.PING, []
        pending.data = bytearray(encode(kind, flags, transaction, me, endpoint.token, body, asked=asked))
        pending.timeout = self._endpoints.timeout(endpoint)
        pending.tries = TRIES - question.tries
        self._pending[transaction] = pending
        if not proved:
            self._first[address] = []
        self._transmit(transaction)

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
        self.carrier.tell(data, address)

    def is_proven(self, peer_id: bytes, address: Address) -> bool:
        """Whether the node at `address` has proven that it holds the key of `peer_id`."""
        return self.ledger.is_home(address, peer_id)

    def has_token(self, address: Address) -> bool:
        """Whether a request to `address` is served at once, as this node has a token of it."""
        return self._endpoints.at(address).token != NO_TOKEN

    def token_from(self, address: Address) -> bytes:
        """The token that the node at `address` gave, to be shown with each request."""
        return self._endpoints.at(address).token

    def token_for(self, address: Address) -> bytes:
        """The token that this node gives to `address`; only a node that receives there can show it."""
        return self._server.token_for(address)

    def rtt(self, address: Address) -> float | None:
        """The smoothed round-trip time to an address in seconds, when known."""
        return self._endpoints.rtt(address)

    def hurry(self, address: Address, slowest_s: float) -> float:
        """How long to wait for an address before going on elsewhere, when others that were asked together
        with it took at most `slowest_s`, in seconds.
        """
        return self._endpoints.hurry(self._endpoints.at(address), slowest_s)

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
        if endpoint.token == NO_TOKEN and pending.data[3] != RequestKind.PING:  # whose answer is short
            longest = FIND_BYTES if pending.data[3] == RequestKind.FIND else MAX_DATAGRAM
            wanted = int(min(longest // AMPLIFICATION, self.carrier.room(pending.address)))
            data = data.ljust(wanted, b"\x00")
        attempt = pending.tries - (TRIES - pending.question.tries)
        _, at_once = self.carrier.ask(data, pending.address, attempt, transaction)
        if at_once:
            pending.sent[pending.tries] = self._clock()
        pending.tries += 1
        pending.timer = self._loop.call_later(pending.timeout, self._transmit, transaction)
        pending.timeout = min(pending.timeout * BACKOFF, LONGEST_TIMEOUT)

    def _answered(self, data: bytes, head: Head, address: Address, *, by_tcp: bool) -> None:
        pending = self._pending.get(head.transaction) or self._late[head.transaction]
        if pack_address(address) != pending.asked:
            self._complainonce(address, "answers a question that went to another address")
            return
        if by_tcp:
            began = min(pending.sent.values(), default=self._clock())
            self.carrier.answered_by_tcp(head.transaction, address, self._clock() - began)
        else:
            self.carrier.ways.by_udp(address)
        message = decode(data, head)
        if message is None:
            return
        if head.flags & Flag.COOKIE:
            self._answered_by_cookie(pending, head)
            return
        late = self._late.pop(head.transaction, None)
        expected = pending.question.expected
        if expected is not None and message.sender != expected:
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
        self._forget(message.transaction)
        if pending.opens:
            pending.question.expected = message.sender
            self._put(pending.question)
        else:
            pending.question.on_answer(message)

    def _answered_by_cookie(self, pending: Pending, head: Head) -> None:
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
        """Nobody answers, or somebody else lives at the address now: no use in asking again."""
        pending = self._forget(transaction)
        if pending is not None:
            pending.question.on_answer(None)

    def _forget(self, transaction: bytes) -> Pending | None:
        """A question is over; those that waited for it go on when its answer came, else they are over too."""
        pending = self._pending.pop(transaction, None)
        if pending is None:
            return None
        pending.cancel_timers()
        for question, slow_timer in self._first.pop(pending.address, ()):
            if slow_timer is not None:
                slow_timer.cancel()
            if self.ledger.is_proved(pending.address):
                self._put(question)
            else:
                self._loop.call_soon(question.on_answer, None)
        return pending

    def _is_proof(self, message: Message, asked: bytes) -> bool:
        public_key, signature = message.proof[:32], message.proof[32:]
        signed = message.to_prove(asked, self.identity.peer_id)
        return peer_id_of(public_key) == message.sender and verify(public_key, signed, signature)

    # the rest

    def _complainonce(self, address: Address, what: str) -> None:
        if address[0] not in self._complained and len(self._complained) < 256:
            self._complained.add(address[0])
            logger.info("ignored a datagram from %s: it %s", address[0], what)
