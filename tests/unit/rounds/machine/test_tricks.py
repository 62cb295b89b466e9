"""Each kind of message, dropped, forged, unasked, repeated and late, and what a member says of its own
accord: what honest peers keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.messages import Committed, Complain, Message, Query, Ready
from tests.simulation.byzantine import Liar, Told
from tests.simulation.catching import Catching
from tests.simulation.trainer import Node
from tests.simulation.tricks import (
    EPOCHS,
    KINDS,
    LEADERS,
    LED_EPOCHS,
    LED_SECONDS,
    LONG_SECONDS,
    SECONDS,
    Pair,
    Trick,
    cost,
    pairs,
    tricks,
    undisturbed,
)

SEED = 1
PAIRS = 40
OTHER = bytes(32)  # a lineage that nobody has
BEGINS_S = 0.5
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
    assert 0.2 < told.epochs / undisturbed(3, LONG_SECONDS).epochs < 0.5
    assert told.longest <= EPOCHS


def cheap(first: int) -> list[Pair]:
    """Pairs of which neither costs a deadline each time: those are played on demand, for longer."""
    return [pair for pair in pairs(20, first) if pair.seconds == SECONDS]


def honest(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
    return [(0.0, message)]


def mute(liar: Liar, peer: PeerId, message: Message) -> list[tuple[float, Message]]:
    return []


def says_over_and_over(liar: Liar, victims: slice, every: float, says: Callable[[Node], Message]) -> Told:
    """The member says something to each of the victims, over and over."""

    def speak() -> None:
        liar.swarm.world.after(every, speak)
        for node in liar.honest[victims]:
            if node.me in liar.liar.links:
                liar._send(liar.liar, node.me, says(node))

    liar.swarm.world.after(BEGINS_S, speak)
    return liar.run()


@pytest.mark.parametrize(("seed", "victim"), [(2, 0), (4, 0), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_questions_of_no_successor_cost_nobody_its_place(seed: int, victim: int) -> None:
    """One peer is asked between rounds, as if its leader were lost: it would be bound to the asker's ballot,
    refuse its leader's, and be blamed for that.
    """
    liar, asked = Liar(honest, seed), iter(range(10**5, 10**6))

    def says(node: Node) -> Message:
        return Query(Ballot(node.machine.epoch, 1, liar.liar.me, next(asked), node.machine.lineage))

    told = says_over_and_over(liar, slice(victim, victim + 1), 0.05, says)
    assert told.excluded == {}
    assert told.epochs >= Liar(None, seed).run().epochs / 3


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("camp", [5, 1 << 20])
def test_a_lineage_that_nobody_has_keeps_nobody(
    seed: int, camp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member says that it stands in each peer's epoch, on a lineage of its own with many others, and gives
    no state.
    """
    liar, ask = Liar(mute, seed), Catching.ask

    def without_the_liar(catching: Catching) -> None:
        while catching.donors and catching.donors[0] == liar.liar.me and not catching.loaded:
            catching.donors.popleft()
        ask(catching)

    monkeypatch.setattr(Catching, "ask", without_the_liar)

    def says(node: Node) -> Message:
        said = liar.liar.machine.core.progress()
        return replace(
            said, epoch=node.machine.epoch, lineage=OTHER, camp=camp, joining=False, pending=False,
            leader=liar.liar.me,
        )  # fmt: skip

    told = says_over_and_over(liar, slice(None), 0.1, says)
    assert told.longest <= 1
    assert told.epochs >= Liar(None, seed).run().epochs / 3
