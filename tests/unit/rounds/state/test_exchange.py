"""What members do when newcomers ask for their state."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from p2pavg.rounds.state.exchange import StateExchange


class Donor:
    """Busy for ever."""

    epoch_s = 0.3

    async def offer(self, link: int, **asked: Any) -> None:
        return None

    def busy(self) -> dict[str, Any]:
        return {"bytes": 10, "done": 3, "rest": 0.0}


class Asking:
    """A newcomer's link."""

    id = 7

    def __init__(self) -> None:
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def reply(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        self.answer.set_result(answer)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, True),
        ({"have": None, "aligned": False}, True),
        ({"have": [3, b"l" * 32]}, False),
        ({"aligned": True}, False),
    ],
    ids=["bare", "alone", "has a state", "asks others, too"],
)
async def test_rounds_hear_of_a_newcomer_before_its_state_is_copied(asked: Any, told: bool) -> None:
    """Who needs a whole state, and asks nobody else. Others need an epoch to end first, or results alone."""
    heard: list[Any] = []
    exchange = StateExchange(Donor(), lambda: (), heard.append)  # type: ignore[arg-type]
    link: Any = Asking()
    exchange.message(link, {"t": "state", **asked})
    assert await asyncio.wait_for(link.answer, 10) == {"busy": True, "bytes": 10, "done": 3, "rest": 0.0}
    assert heard == ([link] if told else [])
    exchange.close()


async def test_who_waits_for_a_state_itself_has_no_round_wait() -> None:
    """It gives none, so nobody needs to wait for it to be copied."""
    heard: list[Any] = []
    exchange = StateExchange(SimpleNamespace(), lambda: None, heard.append)  # type: ignore[arg-type]
    link: Any = Asking()
    exchange.message(link, {"t": "state"})
    assert "error" in await asyncio.wait_for(link.answer, 10)
    assert heard == []
    exchange.close()


async def test_a_closed_one_answers_nobody() -> None:
    """A question that comes while the peer ends is left alone: nothing is copied for it."""
    heard: list[Any] = []
    exchange = StateExchange(Donor(), lambda: (), heard.append)  # type: ignore[arg-type]
    link: Any = Asking()
    exchange.close()
    exchange.message(link, {"t": "state"})
    for _ in range(3):
        await asyncio.sleep(0)
    assert heard == []
    assert not link.answer.done()


async def test_why_no_state_can_be_given_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Newcomers ask twice a second: what keeps this peer from a copy is one warning until it changes, and is
    what they hear, too.
    """

    class Failing:
        epoch_s = 1.0
        why = "no memory"

        async def offer(self, *_: Any, **__: Any) -> None:
            raise RuntimeError(self.why)

    donor = Failing()
    exchange = StateExchange(donor, lambda: (), lambda link: None)  # type: ignore[arg-type]
    for donor.why in ("no memory", "no memory", "no memory", "no disk", "no disk"):
        link: Any = Asking()
        exchange.message(link, {"t": "state"})
        answer = await asyncio.wait_for(link.answer, 10)
        assert answer == {"error": f"its donor could not copy the state (RuntimeError: {donor.why})"}
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [words.rpartition(": ")[2] for words in told] == ["no memory", "no disk"]
    exchange.close()
