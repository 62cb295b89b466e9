"""The leader waits for newcomers that ask for it, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.rounds.machine import newcomers as module
from p2pavg.rounds.machine.actions import Action, Hold
from p2pavg.rounds.protocol.messages import CatchUp
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

EPOCH_S = 0.2  # of one peer: ten steps


def asked(epoch: int, seconds: float, *, spare: int = 1, link_bps: float = 20e6) -> CatchUp:
    return CatchUp(epoch, spare, seconds, 5_000_000, 900_000, link_bps)


class Waiting:
    """A swarm of one, and a newcomer whose download never ends, unless a test ends it."""

    def __init__(self) -> None:
        self.calm = Calm(1, batch=4, target=40)
        self.calm.swarm.state_seconds = 1e6
        self.calm.epochs(2)
        (self.leader,) = self.calm.nodes
        self.newcomer = self.calm.swarm.add(Role.JOINER, 0.02, 4)
        self.calm.run(5.0, lambda: self.newcomer.machine.core.here.joining is not None)
        self.holds: list[Hold] = []
        acted = self.calm.swarm.acted

        def record(node: Node, action: Action) -> None:
            acted(node, action)
            if isinstance(action, Hold):
                self.holds.append(action)

        self.calm.swarm.acted = record  # type: ignore[method-assign]

    def say(self, message: CatchUp, seconds: float, every: float = 0.5) -> int:
        """Say it again and again for so long; epochs that the leader made meanwhile."""
        before = self.leader.machine.epoch
        left = seconds
        while left > 0:
            self.calm.swarm.send(self.newcomer, self.leader.me, message)
            self.calm.run(min(every, left))
            left -= every
        return self.leader.machine.epoch - before


def test_rounds_wait_while_a_newcomer_lacks_too_much() -> None:
    """The next round begins when the newcomer lacks one result, and not when it lacks two."""
    waiting = Waiting()
    at = waiting.leader.machine.epoch
    made = waiting.say(asked(at, 1e6), 3.0)
    assert made == 2
    assert [hold.peer for hold in waiting.holds] == [waiting.newcomer.me]
    assert waiting.say(asked(at + 2, 1e6), 3.0) == 2


def test_rounds_wait_for_whoever_is_about_to_enter() -> None:
    """A newcomer that has its state is waited for until it takes part, however little it lacks."""
    waiting = Waiting()
    assert waiting.say(asked(waiting.leader.machine.epoch, 1e6, spare=0), 3.0) <= 1


def test_rounds_go_on_as_soon_as_a_newcomer_needs_no_wait() -> None:
    """One that asked before it knew its link takes its word back, and nobody was told of it."""
    waiting = Waiting()
    at = waiting.leader.machine.epoch
    assert waiting.say(asked(at, 1.7, link_bps=0.0), 1.0) <= 2
    before = waiting.leader.machine.epoch
    waiting.say(asked(at, 0.0, spare=0), 5 * EPOCH_S)
    assert waiting.leader.machine.epoch >= before + 4
    assert not waiting.holds


@pytest.mark.parametrize("seconds", [2.0, 7.0])
def test_rounds_wait_for_a_bounded_time(seconds: float) -> None:
    """A newcomer that never gets further has as many seconds as it told, in all."""
    waiting = Waiting()
    message = asked(waiting.leader.machine.epoch, seconds, spare=0)
    waiting.say(message, seconds - 0.5)
    held = waiting.leader.machine.epoch
    assert held <= message.epoch + 1
    waiting.say(message, 0.5 + 10 * EPOCH_S)
    assert waiting.leader.machine.epoch >= held + 8


def test_a_newcomer_that_used_up_its_time_is_waited_for_again_later() -> None:
    """After ten times as long as it had, rounds wait for it once more: its link may be better by then."""
    waiting = Waiting()
    seconds = 2.0
    message = asked(waiting.leader.machine.epoch, seconds, spare=0)
    waiting.say(message, seconds + 0.5)
    waiting.say(message, (module.PAUSE_FACTOR - 1) * seconds)
    before = waiting.leader.machine.epoch
    assert before > message.epoch + 50
    made = waiting.say(message, 2 * seconds)
    assert made < 0.7 * 2 * seconds / EPOCH_S


def test_newcomers_together_hold_up_rounds_for_a_tenth_of_the_time_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever they say that they need, and under however many names: here after five seconds in all."""
    monkeypatch.setattr(module, "MOST_HELD_S", 5.0)
    waiting = Waiting()
    message = asked(waiting.leader.machine.epoch, 1e6, spare=0)
    assert waiting.say(message, 4.0) <= 1
    other = waiting.calm.swarm.add(Role.JOINER, 0.02, 4)
    waiting.calm.run(0.5, lambda: other.machine.core.here.joining is not None)
    waiting.newcomer, first = other, waiting.newcomer
    waiting.say(message, 2.0)
    before = waiting.leader.machine.epoch
    assert waiting.say(message, 20.0) >= 0.8 * 20.0 / EPOCH_S
    waiting.newcomer = first
    assert waiting.say(message, 20.0) >= 0.8 * 20.0 / EPOCH_S
    assert waiting.leader.machine.epoch > before
    assert waiting.leader.machine.newcomers.allowance() <= 5.0


def test_newcomers_that_are_gone_take_no_memory() -> None:
    """A peer that is no leader forgets who asked and left, when the next one asks."""
    waiting = Waiting()
    newcomers = waiting.leader.machine.newcomers
    for number in range(1000):
        newcomers.on_catch_up(number.to_bytes(20, "big"), asked(0, 1.0))
    assert len(newcomers._asked) <= 2


def test_a_newcomer_that_says_nothing_more_is_not_waited_for() -> None:
    """Its word holds for a few seconds."""
    waiting = Waiting()
    message = asked(waiting.leader.machine.epoch, 1e6, spare=0)
    waiting.say(message, 1.0)
    before = waiting.leader.machine.epoch
    waiting.calm.run(module.FRESH_S + 10 * EPOCH_S)
    assert waiting.leader.machine.epoch >= before + 8


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_who_is_gone_is_not_waited_for(how: str) -> None:
    """A newcomer whose process ends, or stops, holds up nobody."""
    waiting = Waiting()
    message = asked(waiting.leader.machine.epoch, 1e6, spare=0)
    waiting.say(message, 1.0)
    before: Any = waiting.leader.machine.epoch
    if how == "gone":
        waiting.newcomer.alive = False
        waiting.calm.swarm.closed(waiting.newcomer, "connection reset")
    else:
        waiting.newcomer.stop()
    waiting.calm.run(1.5 + 5 * EPOCH_S)
    assert waiting.leader.machine.epoch >= before + 4
