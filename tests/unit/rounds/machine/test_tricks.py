"""Each kind of message, dropped, forged, unasked, repeated and late: what honest peers keep."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.rounds.protocol.messages import Committed, Complain, Ready
from tests.simulation.byzantine import Liar
from tests.simulation.tricks import (
    EPOCHS,
    KINDS,
    LEADERS,
    LED_EPOCHS,
    LED_SECONDS,
    LONG_SECONDS,
    SECONDS,
    SHARE,
    Pair,
    Trick,
    cost,
    pairs,
    tricks,
    undisturbed,
)

SEED = 1
PAIRS = 40
UNBEGUN = Pair(Trick(Ready, "forge", "wait"), Trick(Committed, "drop"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_trick_of_a_member_costs_more_than_is_promised(kind: type[Any]) -> None:
    """Honest peers keep a third of the epochs, miss no two on end, and apply equal averages.

    `python -m tests.simulation.tricks --seeds 0:65` plays ten thousand schedules.
    """
    played = [each for each in tricks() if each.kind is kind]
    found = {
        str(trick): cost(Liar(trick, SEED).run(trick.seconds), undisturbed(SEED, trick.seconds))
        for trick in played
    }
    assert {trick: why for trick, why in found.items() if why} == {}


@pytest.mark.parametrize("kind", LEADERS)
def test_a_leader_that_lies_loses_the_lead(kind: type[Any]) -> None:
    """Whatever it does with what leaders send, honest members go on under another one, and keep as much."""
    played = [each for each in tricks() if each.kind is kind]
    calm = undisturbed(SEED, LED_SECONDS)
    found = {
        str(trick): cost(Liar(trick, SEED, leads=True).run(LED_SECONDS), calm, LED_EPOCHS) for trick in played
    }
    assert {trick: why for trick, why in found.items() if why} == {}


@pytest.mark.parametrize("first", range(0, PAIRS, 20))
def test_no_two_tricks_at_once_cost_more_than_is_promised(first: int) -> None:
    """A member that plays two of them, drawn at random, costs no more than with one."""
    calm = undisturbed(SEED, SECONDS)
    found = {str(pair): cost(Liar(pair, SEED).run(SECONDS), calm) for pair in cheap(first)}
    assert {pair: why for pair, why in found.items() if why} == {}


def test_who_claims_long_steps_is_not_waited_for_without_end() -> None:
    """Nobody knows yet what an epoch takes: a member that is never ready, and says that its steps are long,
    holds the first one up for no longer than it took until then.
    """
    (pair,) = pairs(1, 2941)
    assert str(pair) == "forge Ready.ballot and forge Progress.step_s"
    assert cost(Liar(pair, SEED).run(SECONDS), undisturbed(SEED, SECONDS)) == ""


def test_who_begins_no_round_says_so() -> None:
    """A member that declares another wait than its own lets go of each round that counts it. Each leader is
    told at once, instead of waiting for a deadline. When that member leads, it tells nobody of commits.
    """
    assert cost(Liar(UNBEGUN, 3).run(LONG_SECONDS), undisturbed(3, LONG_SECONDS)) == ""


def test_three_tricks_at_once_cost_more_than_two() -> None:
    """What is not promised: the same member keeps that to itself, and each leader learns it by a deadline."""
    told = Liar(Pair(UNBEGUN, Trick(Complain, "drop")), 3).run(LONG_SECONDS)  # type: ignore[arg-type]
    assert 0.2 < told.epochs / undisturbed(3, LONG_SECONDS).epochs < SHARE
    assert told.longest <= EPOCHS


def cheap(first: int) -> list[Pair]:
    """Pairs of which neither costs a deadline each time: those are played on demand, for longer."""
    return [pair for pair in pairs(20, first) if pair.seconds == SECONDS]
