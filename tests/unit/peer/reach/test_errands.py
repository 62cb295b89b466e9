"""What a member does for two others is bounded by who asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from p2pavg.peer.reach import errands
from p2pavg.peer.reach.errands import Errands
from p2pavg.peer.reach.relaying import RelayDesk

ASKS, OTHER = b"a" * 20, b"o" * 20
PUNCH = {"t": "punch", "to": OTHER, "at": [["192.0.2.1", 5]], "by": OTHER, "rtt": 0.1}


class Wire:
    """A link whose other side agrees to everything."""

    way, rtt = "direct", 0.1

    def __init__(self, peer_id: bytes) -> None:
        self.peer_id = peer_id
        self.answers: list[Any] = []

    def reply(self, request: Any, message: Any) -> None:
        self.answers.append(message.get("no"))

    async def request(self, message: Any, timeout: float) -> Any:
        return {"at": message.get("at", [])}


async def test_meetings_are_bounded_by_who_asks() -> None:
    """Whoever asks for very many is told to wait; another one is not."""
    here = Errands({OTHER: Wire(OTHER)}, SimpleNamespace(open=True))  # type: ignore[dict-item]
    often, once = Wire(ASKS), Wire(b"b" * 20)
    many = int(errands._PUNCHES_AT_ONCE)
    for _ in range(many + 20):
        here.punch(often, PUNCH)  # type: ignore[arg-type]
    here.punch(once, PUNCH)  # type: ignore[arg-type]
    await asyncio.gather(*here._tasks)
    assert many - 1 <= often.answers.count(None) <= many + 5
    assert set(often.answers) == {None, "busy"}
    assert once.answers == [None]


async def test_tunnels_are_asked_for_now_and_then() -> None:
    """Sixty-four at once and two a second, whatever becomes of them."""
    endpoint: Any = SimpleNamespace(links={}, party=None, reception=SimpleNamespace())
    desk, often = RelayDesk(endpoint, lambda: 1e6, lambda: False), Wire(ASKS)
    for _ in range(80):
        desk.asked(often, {"t": "relay", "to": OTHER})  # type: ignore[arg-type]
    assert 64 <= often.answers.count("UNLINKED") <= 70
    assert set(often.answers) == {"UNLINKED", "BUSY"}
    desk.close()
