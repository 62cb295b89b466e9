"""The address of a connection as the other side sees it, which a NAT may have translated."""

from __future__ import annotations

import socket

from p2pavg.errors import ProtocolError
from p2pavg.transport.links import handshake
from p2pavg.transport.links import raw_socket as wire
from p2pavg.transport.links.handshake import Party


async def tell(sock: socket.socket, at: tuple[str, int], party: Party) -> None:
    """Tell the other side its address; keep the connection, and so its NAT's mapping, until it closes."""
    answer = handshake.pack({"at": list(at)})
    await wire.send(sock, handshake.preamble(handshake.OBSERVE, party) + answer)
    await wire.at_end(sock)


async def ask(sock: socket.socket, party: Party) -> tuple[str, int]:
    """The address of this side of a connected socket, as a member of the run sees it.

    Raises ProtocolError, UnreachableError, Refusal, OSError.
    """
    await wire.send(sock, handshake.preamble(handshake.OBSERVE, party))
    handshake.parse_preamble(await wire.receive(sock, handshake.PREAMBLE_BYTES), party)
    answer = await wire.receive_message(sock)
    handshake.raise_refusal(answer)
    return parse(answer)


def parse(answer: dict[str, object]) -> tuple[str, int]:
    """The address in an answer. Raises ProtocolError for an invalid one."""
    at = answer.get("at")
    if not isinstance(at, list) or len(at) != 2 or not handshake.is_address(at[0], at[1]):
        raise ProtocolError("an observed address that is none")
    return at[0], at[1]
