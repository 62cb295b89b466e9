"""Turns of the flows of a relay, within its cap."""

from __future__ import annotations

import pytest

from p2pavg.transport.ways.turns import LEAST_TURN_BYTES as TURN_BYTES
from p2pavg.transport.ways.turns import MOST_TURN_BYTES, Turns


def test_turns_are_given_in_order_and_within_the_cap() -> None:
    """Two greedy flows get turns one after the other, and together what the cap allows."""
    turns: Turns[str] = Turns()
    turns.limit(1e6, 0.0)
    passed = {"a": 0, "b": 0}
    order = []
    turns.ask("a")
    turns.ask("b")
    for tick in range(10_001):
        while (flow := turns.next(tick / 1000)) is not None:
            order.append(flow)
            passed[flow] += TURN_BYTES
            turns.spend(TURN_BYTES)
            turns.ask(flow)
    assert order[:4] == ["a", "b", "a", "b"]
    assert abs(sum(passed.values()) - 10e6) <= 3 * TURN_BYTES
    assert abs(passed["a"] - passed["b"]) <= TURN_BYTES


def test_a_flow_with_little_to_say_waits_for_one_turn_of_the_others() -> None:
    """A heartbeat beside a download goes out after the turn that is under way."""
    turns: Turns[str] = Turns()
    turns.limit(1e6, 0.0)
    turns.ask("download")
    assert turns.next(0.0) == "download"
    turns.spend(TURN_BYTES)
    turns.ask("heartbeat")
    turns.ask("download")
    wait = turns.wait_s(0.0)
    assert 0 < wait <= TURN_BYTES / 1e6
    assert turns.next(0.0) is None
    assert turns.next(wait) == "heartbeat"


def test_a_flow_that_ended_gets_no_turn() -> None:
    """Nor is the cap spent on it."""
    turns: Turns[str] = Turns()
    turns.ask("gone")
    turns.ask("here")
    turns.leave("gone")
    turns.leave("never")
    assert [turns.next(0.0), turns.next(0.0)] == ["here", None]


@pytest.mark.parametrize(
    ("rate", "nbytes"), [(1.0, TURN_BYTES), (1e6, TURN_BYTES), (5e6, 50_000), (1e9, MOST_TURN_BYTES)]
)
def test_a_turn_is_a_hundredth_of_a_second_of_the_cap(rate: float, nbytes: int) -> None:
    """Within bounds: short turns for a small cap, few system calls for a large one."""
    turns: Turns[str] = Turns()
    turns.limit(rate, 0.0)
    assert turns.turn_bytes == nbytes
