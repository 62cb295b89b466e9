"""What a member does for two others is bounded by who asks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from p2pavg.peer.reach import errands
from p2pavg.peer.reach.errands import Errands
from p2pavg.peer.reach.relaying import RelayDesk

ASKS, OTHER = b"a" * 20, b"o" * 20
SEEN, ALSO_SEEN, ELSEWHERE = ("192.0.2.1", 5), ("203.0.113.5", 9), ["198.51.100.1", 443]
PUNCH = {"t": "punch", "to": OTHER, "at": [list(SEEN)], "by": OTHER, "rtt": 0.1}


class Wire:
    """A link whose other side agrees to everything."""

    way, rtt, address = "direct", 0.1, ("192.0.2.1", 31330)

    def __init__(self, peer_id: bytes) -> None:
        self.peer_id = peer_id
        self.answers: list[Any] = []

    def reply(self, request: Any, message: Any) -> None:
        self.answers.append(message.get("no"))

    async def request(self, message: Any, timeout: float) -> Any:
        return {"at": message.get("at", [])}


async def test_meetings_are_bounded_by_who_asks() -> None:
    """Whoever asks for very many is told to wait; another one is not."""
    here = Errands({OTHER: Wire(OTHER)}, SimpleNamespace(open=True), {SEEN})  # type: ignore[dict-item]
    often, once = Wire(ASKS), Wire(b"b" * 20)
    many = int(errands._MEETINGS_AT_ONCE)
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


class Answering(Wire):
    """A link whose other side answers this, and what was asked of it."""

    def __init__(self, peer_id: bytes, answer: Any) -> None:
        super().__init__(peer_id)
        self.answer = answer
        self.asked: list[Any] = []

    def reply(self, request: Any, message: Any) -> None:
        self.answers.append(message)

    async def request(self, message: Any, timeout: float) -> Any:
        self.asked.append(message)
        return self.answer


async def passed_on(at: Any, answer: Any, rtt: float = 5.0) -> tuple[list[Any], Any]:
    """What the other side is told, and what the side that asks is answered, by a member that has seen SEEN
    and ALSO_SEEN.
    """
    asks, other = Answering(ASKS, None), Answering(OTHER, answer)
    links: Any = {OTHER: other}
    here = Errands(links, SimpleNamespace(open=True), {SEEN, ALSO_SEEN})
    here.punch(asks, {**PUNCH, "at": at, "rtt": rtt})  # type: ignore[arg-type]
    await asyncio.gather(*here._tasks)
    (said,) = asks.answers
    return other.asked, said


async def test_nobody_is_sent_to_dial_whom_the_member_has_not_seen() -> None:
    """A member passes on a port alone that it sees at this moment: neither side can name somebody else's."""
    asked, said = await passed_on([list(SEEN)], {"at": [list(ALSO_SEEN)]})
    assert [message["at"] for message in asked] == [[list(SEEN)]]
    assert said == {"t": "punch", "at": [list(ALSO_SEEN)]}
    for at in (ELSEWHERE, [SEEN[0], SEEN[1] + 1]):
        assert await passed_on([at], {"at": [list(ALSO_SEEN)]}) == ([], {"t": "punch", "no": "unobserved"})
        asked, said = await passed_on([list(SEEN)], {"at": [at]})
        assert said == {"t": "punch", "no": "unobserved"}
    for nonsense in ({}, {"at": 5}, {"at": []}):
        asked, said = await passed_on([list(SEEN)], nonsense)
        assert said == {"t": "punch", "no": "silent"}


async def test_how_long_a_word_takes_is_the_members_own_measure() -> None:
    """Whoever asks cannot have the other side try for longer than their distance calls for."""
    (asked,), _ = await passed_on([list(SEEN)], {"no": "unobserved"}, rtt=5.0)
    assert asked["rtt"] == 0.2  # 0.1 s to each
