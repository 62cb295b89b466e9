"""Answering requests: who is served how much, how long an answer may be, and what a proof says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import msgpack

from p2pavg.identity import Identity
from p2pavg.membership.table.address import Address, pack_address, unpack_address
from p2pavg.membership.table.ledger import AMPLIFICATION, AddressLedger
from p2pavg.membership.table.throttle import Throttle
from p2pavg.membership.table.wire import (
    MAX_DATAGRAM,
    TOKEN_BYTES,
    Contact,
    Flag,
    Head,
    Message,
    RequestKind,
    decode,
    encode,
)
from p2pavg.networks import source_of

REQUESTS_PER_S, REQUESTS_AT_ONCE = 500.0, 1000.0  # of one source
STRANGERS_PER_S, STRANGERS_AT_ONCE = 200.0, 600.0  # requests without a token; more get a token alone
BEAT_WORK = 0.25  # of a request
SIGNED_WORK = 4.0  # of what holds signatures, which are checked
HEAD_ROOM = 160  # bytes of an answer beside its body

Send = Callable[[bytes], bool]
"""Sends an answer to who asked; whether it went."""


class Service(Protocol):
    """The answers of a node to the datagrams of others."""

    def handle(self, message: Message, address: Address, returnable: bool, room: int) -> list[Any] | None:
        """The body of the answer to a request, None to stay silent. returnable: they receive at `address`."""

    def handle_beat(self, data: bytes, address: Address) -> None:
        """A heartbeat came."""

    def heard_late(self, contact: Contact) -> None:
        """A contact answered when nobody waited for it any more."""

    def lives_at(self, asked: Address, asker: Address) -> bool:
        """Whether `asked`, an address that this node is asked to sign, may be its own."""


class Server:
    """Serves what comes to one node."""

    def __init__(
        self,
        identity: Identity,
        service: Service,
        ledger: AddressLedger,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._service = service
        self._ledger = ledger
        self._clock = clock
        self._secret = os.urandom(32)
        self._throttle = Throttle(rate=REQUESTS_PER_S, burst=REQUESTS_AT_ONCE)
        self._strangers = Throttle(rate=STRANGERS_PER_S, burst=STRANGERS_AT_ONCE)

    def admits(self, address: Address, work: float = 1.0) -> bool:
        """Whether to work for what came from there."""
        return self._throttle.admits(source_of(address[0]), self._clock(), work)

    def token_for(self, address: Address) -> bytes:
        """What only who receives at `address` can show."""
        return hashlib.blake2b(pack_address(address), key=self._secret, digest_size=TOKEN_BYTES).digest()

    def requested(
        self, data: bytes, head: Head, address: Address, send: Send, *, verified: bool = False
    ) -> None:
        """One request came, and is answered by `send`. verified: they receive what is sent so."""
        token = self.token_for(address)
        returnable = verified or head.token == token
        if verified:
            pass  # over TCP; that the port which they name leads to them is not shown
        elif returnable:
            self._ledger.proved(address)
        elif not self._strangers.admits("", self._clock()):
            flags = Flag.ANSWER | Flag.COOKIE | head.flags & Flag.TRY
            send(encode(head.kind, flags, head.transaction, self._identity.peer_id, token, []))
            return
        work = SIGNED_WORK if head.kind in (RequestKind.STORE, RequestKind.REVOKED) and returnable else 1.0
        message = decode(data, head) if self.admits(address, work) else None
        if message is not None:
            self._serve(message, address, token, returnable, send)

    def _serve(self, message: Message, address: Address, token: bytes, returnable: bool, send: Send) -> None:
        proves = message.flags & Flag.PROVE
        if proves:
            asked = unpack_address(message.asked)
            own = message.sender == self._identity.peer_id  # a question of this node, back from where it went
            if asked is None or not (own or self._service.lives_at(asked, address)):
                return
        limit = MAX_DATAGRAM if returnable else min(MAX_DATAGRAM, AMPLIFICATION * message.size)
        body = self._service.handle(message, address, returnable, limit - HEAD_ROOM)
        if body is None:
            return
        flags, proof = Flag.ANSWER | message.flags & Flag.TRY, b""
        me = self._identity.peer_id
        if proves:
            flags |= Flag.PROOF
            packed = msgpack.packb(body)
            answer = Message(message.kind, flags, message.transaction, me, token, body, packed=packed)
            signed = answer.to_prove(message.asked, message.sender)
            proof = self._identity.public_key + self._identity.sign(signed)
        data = encode(message.kind, flags, message.transaction, me, token, body, proof=proof)
        if len(data) <= limit:
            send(data)
