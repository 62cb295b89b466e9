"""Turns of the flows of a relay, within its cap."""

from __future__ import annotations

from p2pavg.transport.ways.turns import TURN_BYTES, Turns


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
