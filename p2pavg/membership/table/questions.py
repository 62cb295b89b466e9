"""Questions that wait for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2pavg.membership.table.address import Address, pack_address
from p2pavg.membership.table.wire import Message

Answer = Callable[[Message | None], None]


@dataclass(slots=True)
class Question:
    """A request to one address, and the futures of those that wait for its answer."""

    address: Address
    kind: int
    body: list[Any]
    on_answer: Answer
    expected: bytes | None
    on_slow: Callable[[], None] | None
    tries: int
    prove: bool


class Pending:
    """A question on its way."""

    __slots__ = (
        "asked",
        "cookie",
        "data",
        "opens",
        "question",
        "sent",
        "slow_timer",
        "timeout",
        "timer",
        "tries",
    )

    def __init__(self, question: Question, slow_timer: asyncio.TimerHandle | None) -> None:
        self.question = question
        self.asked = pack_address(question.address)
        self.cookie = False  # whether a token alone came back already
        self.opens = False  # whether it is a ping before the question itself
        self.data = bytearray()
        self.tries = 0
        self.timeout = 0.0
        self.sent: dict[int, float] = {}  # try -> when
        self.timer: asyncio.TimerHandle | None = None
        self.slow_timer = slow_timer

    @property
    def address(self) -> Address:
        """The address to which the request went."""
        return self.question.address

    def cancel_timers(self) -> None:
        """Nothing happens by itself any more."""
        for timer in (self.timer, self.slow_timer):
            if timer is not None:
                timer.cancel()


def once(call: Callable[[], None] | None) -> Callable[[], None] | None:
    """The same, that does nothing when it is called again."""
    if call is None:
        return None
    calls = [call]
    return lambda: calls.pop()() if calls else None
