"""What members say of links that they lack: what to feed, and seeds."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from p2pavg.errors import ProtocolError
from p2pavg.peer.reach.errands import Errands, peer_in
from p2pavg.transport.links import handshake, observing
from p2pavg.transport.ways import punching
from tests.fuzz import told
from tests.fuzz.target import Target

PEER, OTHER = b"p" * 20, b"o" * 20
AT = [["192.0.2.7", 31330], ["192.168.1.4", 31330]]


def _body(message: dict[str, Any]) -> bytes:
    return handshake.pack(message)[handshake.HEAD_BYTES :]


def _asked() -> list[bytes]:
    offer = {"t": "punch", "at": AT, "by": OTHER, "rtt": 0.04}
    messages = (offer, {**offer, "to": OTHER}, {**offer, "from": OTHER}, {"t": "knows", "peer": OTHER})
    return [_body(message) for message in messages]


class _Link:
    """Answers at once, with what was asked."""

    peer_id, rtt = PEER, 0.1

    def __init__(self) -> None:
        self.said: list[Any] = []

    def reply(self, request: Any, message: Any) -> None:
        handshake.pack(message)
        self.said.append(message)

    async def request(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        return message


async def _take_asked(data: bytes) -> None:
    """Whatever is asked, a right offer alone is passed on, and each question has one answer at most."""
    try:
        message = handshake.unpack(data)
    except ProtocolError:
        return
    link: Any = _Link()
    errands = Errands({OTHER: link}, SimpleNamespace(open=True))
    with contextlib.suppress(ProtocolError):
        errands.knows(link, message)
    with contextlib.suppress(ProtocolError):
        errands.punch(link, message)
        await asyncio.gather(*errands._tasks)
        assert link.said
    with contextlib.suppress(ProtocolError):
        offer = punching.parse_offer(message)
        assert punching.parse_offer({**offer.to_message()}) == offer
        assert offer.at[0] in punching.targets(offer.at, offer.at)
        assert 0 < punching.burst_s(offer.rtt_s) <= punching.MOST_BURST_S
    with contextlib.suppress(ProtocolError):
        assert len(peer_in(message, "from")) == 20
    assert len(link.said) <= 2


def _observed() -> list[bytes]:
    return [_body({"at": AT[0]})]


def _parse_observed(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        host, port = observing.parse(handshake.unpack(data))
        assert handshake.is_address(host, port)


TARGETS = (
    Target("meeting", told.in_loop(_take_asked), _asked),
    Target("observed", _parse_observed, _observed),
)
