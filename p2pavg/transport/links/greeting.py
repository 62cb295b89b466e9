"""The handshake on a control connection: afterwards two peers have proved to each other who they are."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2pavg.credentials import Tls
from p2pavg.errors import CredentialError, ProtocolError, UnreachableError
from p2pavg.identity import Identity
from p2pavg.transport.links import handshake, proofs
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.control import ControlConnection
from p2pavg.transport.links.handshake import Hello, Refusal

Admit = Callable[[Hello], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Met:
    """Two peers that have proved to each other who they are."""

    connection: ControlConnection
    dialler: Hello
    listener: Hello
    rtt_s: float


async def as_dialler(
    sock: socket.socket,
    identity: Identity,
    mine: Hello,
    admit: Admit,
    credentials: Tls | None = None,
) -> Met:
    """Greet as the side that dialled.

    admit(theirs): called once the other side has proved its identity. The other side is told a Refusal that
    `admit` raises.

    Raises Refusal (of either side), ProtocolError, UnreachableError, OSError; then the socket is closed.
    """
    began = time.monotonic()
    hello = b"" if credentials is not None else handshake.pack(mine.facts)
    party = _party(mine, credentials)
    with _closing(sock):
        await wire.send(sock, handshake.preamble(handshake.CONTROL, party) + hello)
        try:
            handshake.parse_preamble(await wire.receive(sock, handshake.PREAMBLE_BYTES), party)
        except ProtocolError:
            raise UnreachableError("what answers there is not a p2pavg peer; check the address") from None
    connection = await ControlConnection.over(sock, dialled=True, credentials=credentials)
    with _closing(connection):
        if credentials is not None:
            began = time.monotonic()
            connection.write(mine.facts)
        answer = await connection.read()
        rtt = time.monotonic() - began
        theirs = handshake.parse_hello(answer)
        try:
            handshake.check_key(theirs, _proven_key(connection))
            proofs.check_signature(mine, theirs, theirs, answer)
            await admit(theirs)
        except Refusal as refusal:
            connection.write(refusal.message())
            raise
        connection.trust()
        connection.write({"sig": identity.sign(proofs.transcript(mine, theirs, mine))})
        handshake.raise_refusal(await connection.read())
    return Met(connection, mine, theirs, rtt)


async def as_listener(
    sock: socket.socket,
    identity: Identity,
    mine: Hello,
    check: Callable[[Hello], None],
    admit: Admit,
    credentials: Tls | None = None,
) -> Met:
    """Greet as the side that listened.

    check(theirs): called with the other side's hello; admit(theirs): called once the other side has proved
    its identity. The other side is told a Refusal that either raises. Nothing is awaited between `admit` and
    the return. Raises like `as_dialler`.
    """
    with _closing(sock):
        await wire.send(sock, handshake.preamble(handshake.CONTROL, _party(mine, credentials)))
    connection = await ControlConnection.over(sock, dialled=False, credentials=credentials)
    with _closing(connection):
        theirs = handshake.parse_hello(await connection.read())
        try:
            handshake.check_key(theirs, _proven_key(connection))
            check(theirs)
            began = time.monotonic()
            signature = identity.sign(proofs.transcript(theirs, mine, mine))
            connection.write({**mine.facts, "sig": signature})
            proof = await connection.read()
            rtt = time.monotonic() - began
            handshake.raise_refusal(proof)
            proofs.check_signature(theirs, mine, theirs, proof)
            await admit(theirs)
        except Refusal as refusal:
            connection.write(refusal.message())
            raise
        connection.trust()
        connection.write({"ok": True})
    return Met(connection, theirs, mine, rtt)


def _party(mine: Hello, credentials: Tls | None) -> handshake.Party:
    closed = credentials is not None and credentials.mutual
    return handshake.Party(mine.run[: handshake.PREAMBLE_RUN_BYTES], closed)


def _proven_key(connection: ControlConnection) -> bytes | None:
    """The key that the other side proved to have. Raises Refusal, which the other side is told."""
    try:
        return connection.proven_key()
    except CredentialError as error:
        raise Refusal("credentials", str(error)) from None


@contextmanager
def _closing(opened: socket.socket | ControlConnection) -> Iterator[None]:
    """Close it when the block fails, or is cancelled."""
    try:
        yield
    except BaseException:
        opened.close()
        raise
