"""Whose machine gets another address in the middle of a round decides nothing alone and keeps its samples."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.actions import StartHeal
from p2pavg.rounds.machine.rules.camps import Camp
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.swarm import Swarm
from tests.simulation.trainer import Node

AWAY_S = 0.6
SECONDS = 12.0


class Moving:
    """A swarm of which one peer loses all links right when a transfer has begun, and gets them back."""

    def __init__(self, seed: int, *, leads: bool, told: bool, epochs: int = 3) -> None:
        """told: whether its machine hears that it moved. epochs: how many are over before."""
        self.swarm = Swarm(seed, latency=0.01, chunk_seconds=0.01, target=480, state_seconds=0.05)
        self.nodes = [self.swarm.add(Role.TRAINER, 0.03, 4) for _ in range(4)]
        self.leads, self.told, self.epochs = leads, told, epochs
        self.moved: Node | None = None
        self.alone = False  # whether it decided something while it was away
        self._acted, self.swarm.acted = self.swarm.acted, self.acted  # type: ignore[method-assign]

    def acted(self, node: Node, action: Any) -> None:
        self._acted(node, action)
        if type(action).__name__ == "Commit" and node is self.moved and not node.links:
            self.alone = True
        begins = type(action).__name__ == "BeginJob" and node.machine.epoch >= self.epochs
        if self.moved is None and begins and (node.machine.leader == node.me) is self.leads:
            self.moved = node
            self.swarm.world.after(0.02, lambda: self.move(node))

    def move(self, node: Node) -> None:
        if self.told:
            node.feed(ev.Moved())
        for other in self.nodes:
            if other is not node:
                self.swarm.reset(node, other, "it has another address")
                self.swarm.world.after(AWAY_S, lambda other=other: self.swarm.link(node, other))

    def run(self) -> Moving:
        self.swarm.world.run(SECONDS, lambda: False)
        return self


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("leads", [False, True], ids=["member", "leader"])
def test_who_moves_in_the_middle_of_a_round_loses_no_sample(seed: int, leads: bool) -> None:
    """It has none of its own to name, all stand where they would, and nobody went on alone."""
    made = Moving(seed, leads=leads, told=True).run()
    assert made.moved is not None
    assert not made.alone
    assert [node.discarded for node in made.nodes] == [0] * 4
    epochs = [node.parameters.epoch for node in made.nodes]
    assert max(epochs) - min(epochs) <= 1
    assert min(epochs) > made.epochs + 2


def test_without_being_told_it_goes_on_alone() -> None:
    """What others would take for a partition costs its samples, all named."""
    made = Moving(1, leads=False, told=False).run()
    assert made.moved is not None
    assert made.alone or made.moved.discarded


def test_a_peer_that_is_alone_for_good_goes_on() -> None:
    """After five seconds it decides as the last one that is left."""
    made = Moving(1, leads=False, told=True)
    move = made.move

    def for_good(node: Node) -> None:
        made.swarm.link = lambda a, b: None  # type: ignore[method-assign]
        move(node)

    made.move = for_good  # type: ignore[method-assign]
    made.run()
    assert made.moved is not None
    assert made.moved.parameters.epoch > made.epochs
    assert made.alone


@pytest.mark.parametrize("averaged", [True, False])
def test_samples_that_the_others_averaged_are_not_averaged_again(averaged: bool) -> None:
    """A result that has own samples, which wait here too, is not applied: the next download is of a state."""
    swarm = Moving(1, leads=False, told=False).swarm
    swarm.world.run(3.0, lambda: False)
    core = (machine := next(iter(swarm.nodes.values())).machine).core
    core.own.samples = 8
    core.history.offer(core.here.epoch, 77, 8)
    assert machine.healing.counts_again(core.here.epoch, 77 if averaged else 78) is averaged
    machine.healing._start(Camp(core.here.epoch + 1, b"l" * 32, 3, 9), "behind the others")
    (heal,) = [action for action in core.take_actions() if isinstance(action, StartHeal)]
    assert heal.results_do is not averaged
