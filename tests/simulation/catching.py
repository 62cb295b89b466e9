"""A simulated download: the state of a donor, then every result since, until the node is level."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.protocol.messages import CatchUp
from p2pavg.rounds.protocol.roles import Generation, Role
from tests.simulation.process import Parameters

if TYPE_CHECKING:
    from tests.simulation.trainer import Node

LOOK_S = 0.02  # between two looks for the next result
RESULTS_OF_A_STATE = 4.0  # so many results take as long as a state
HELD = 1.5  # times the state's own time that rounds may wait for it
GIVE_UP_LOOKS = 50  # without anybody that has the next result


def followed(commit: act.Commit) -> ev.Followed:
    """What the machine is told when the result is applied."""
    ballot, samples = commit.ballot, sum(commit.samples)
    return ev.Followed(ballot.epoch, commit.before, commit.lineage, commit.transfer, samples, ballot.leader)


class Catching:
    """What the driver does between StartHeal and Level."""

    def __init__(self, node: Node, action: act.StartHeal) -> None:
        self.node = node
        self.swarm = node.swarm
        self.world = node.world
        self.action = action
        self.donors = deque(action.donors)
        self.loaded = action.results_do and self._results_do()  # the state is with the training thread
        self.results_only = self.loaded
        self.asked = False  # that rounds wait
        self._looks = 0

    @property
    def off(self) -> bool:
        return self.node.healing is not self or not self.node.alive

    def _results_do(self) -> bool:
        """A donor has what follows on the node's own state, or stands there itself."""
        nodes, here = self.swarm.nodes, self.node.parameters.lineage
        donors = (nodes[peer] for peer in self.action.donors)
        return any(here in donor.made or here == donor.parameters.lineage for donor in donors)

    def _again(self, seconds: float) -> None:
        self.world.after(seconds, self.follow if self.loaded else self.ask)

    def ask(self) -> None:
        """One donor after the other."""
        node, swarm = self.node, self.swarm
        if self.off:
            return
        if self.loaded:
            self.follow()
            return
        if not self.donors:
            self._failed("no donor answered")
            return
        donor = swarm.nodes[self.donors.popleft()]
        if not swarm.reaches(donor, node) or donor.machine.role is not Role.TRAINER:
            self._again(0.3)
        elif donor.running:
            # Others may download an older snapshot: they share it.
            old = donor.past and (swarm.only_old or self.world.random.random() < 0.3)
            parameters = self.world.random.choice(donor.past) if old else donor.parameters
            history = tuple(g for g in donor.machine.history if g.epoch < parameters.epoch)
            self.world.after(swarm.state_seconds, lambda: self._got(donor, parameters, history))
        else:
            self._again(0.3)

    def _got(self, donor: Node, parameters: Parameters, history: tuple[Generation, ...]) -> None:
        if self.off:
            return
        if not self.swarm.reaches(donor, self.node):
            self.ask()
            return
        self.loaded = True
        self.node.outcomes.appendleft(("heal", Parameters(parameters.epoch, parameters.lineage, history)))
        self.node.give_next()
        self.follow()

    def follow(self) -> None:
        """One result after the other, as soon as the last one is applied."""
        node, swarm = self.node, self.swarm
        if self.off:
            return
        if not node.running or node.outcomes or node.applying:
            self._again(LOOK_S)
            return
        before = node.parameters.lineage
        if (node.parameters.epoch, before) != (node.machine.epoch, node.machine.lineage):
            self._failed("what was loaded belongs to something else")
            return
        giver = next((n for n in swarm.nodes.values() if before in n.made and swarm.reaches(n, node)), None)
        if giver is not None:
            self._looks = 0
            self._ask_to_wait()
            commit, job = giver.made[before]
            given = replace(commit, following=True, late=True)
            seconds = 3 * swarm.latency + swarm.state_seconds / RESULTS_OF_A_STATE
            self.world.after(seconds, lambda: self._came(given, job))
        elif node.machine.level:
            node.healing = None
            node.feed(ev.Level())
            node.go_on_level()
        elif self._looks < GIVE_UP_LOOKS:
            self._looks += 1
            self._again(LOOK_S)
        else:
            self._failed("nobody has the next result")

    def _came(self, commit: act.Commit, job: object) -> None:
        if self.off:
            return
        healing = self.node.machine.healing
        if self.results_only and healing.counts_again(commit.ballot.epoch, commit.transfer):
            self._failed("samples that wait here are averaged already")
        else:
            self.node.outcomes.append(("average", (commit, job)))
            self.node.give_next()
            self._again(LOOK_S)

    def _ask_to_wait(self) -> None:
        seconds = HELD * self.swarm.state_seconds
        message = CatchUp(self.node.parameters.epoch, 0, seconds, 1, 1, 1.0)
        for peer in list(self.node.links):
            self.swarm.send(self.node, peer, message)

    def _failed(self, why: str) -> None:
        self.node.healing = None
        self.node.feed(ev.HealFailed(why))
        self.node.give_next()
