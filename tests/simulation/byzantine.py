"""One member that lies to the others of an otherwise calm swarm, and what that costs the honest ones.

Everybody runs the real machine; the liar's messages are changed on their way out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Message
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.books import Books
from tests.simulation.checks import Checks
from tests.simulation.said import Said
from tests.simulation.swarm import Swarm
from tests.simulation.trainer import Node, Sample

PEERS = 5
SECONDS = 20.0  # virtual
Trick = Callable[["Liar", PeerId, Message], list[tuple[float, Message]]]  # (seconds from now, what)


class Unheard(Said):
    """Nothing that was said is held against anybody."""

    def tells_itself(self, node: Any, message: Any) -> None:
        pass


class Unkept(Books):
    """A liar's samples are what it says."""

    def waits(self, node: Node) -> None:
        pass

    def handed(self, giver: Node, receiver: Node, samples: list[Sample]) -> None:
        pass


class Honest(Checks):
    """One promise is looked at: honest peers apply one and the same average. The others hold between peers of
    which each says what it does.
    """

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm, data=None)
        self.said, self.books = Unheard(self), Unkept(self, swarm.lineage)
        self.liar: Node | None = None

    def sends(self, node: Node, peer: PeerId, message: Any) -> None:
        pass

    def handled(self, node: Any, event: Any) -> None:
        pass

    def acted(self, node: Any, action: Any) -> None:
        pass

    def rests(self, node: Any) -> None:
        pass

    def applied(self, node: Node, commit: act.Commit, job: Any) -> None:
        if node is self.liar or commit.following:  # whoever heals goes over to another lineage, as it says
            return
        first, _ = self.after.setdefault(commit.before, (commit.lineage, commit.ballot))
        if first != commit.lineage:
            self.broken("Equal", f"{node.name} applies another average than others of its lineage")


@dataclass(frozen=True)
class Told:
    """What came of one run."""

    epochs: int  # of the honest peer that has fewest
    excluded: dict[str, int]  # by honest peer: in how many epochs somebody honest left it out
    longest: int  # epochs in a row, of the honest peer that was left out longest
    liar: int  # in how many epochs the liar was left out
    samples: float  # the mean of an average, as a share of the target


class Liar:
    """A swarm in which one member plays a trick. None: it is honest, too. leads: it is the first leader."""

    def __init__(
        self, trick: Trick | None, seed: int = 1, peers: int = PEERS, *, leads: bool = False
    ) -> None:
        self.trick = trick
        self.dice = random.Random(f"liar {seed}")
        self.swarm = Swarm(seed, latency=0.01, chunk_seconds=0.001, target=peers * 40, state_seconds=0.05)
        self.swarm.checks = checks = Honest(self.swarm)
        self.nodes = [self.swarm.add(Role.TRAINER, 0.03, 4) for _ in range(peers)]
        leader = rendezvous(b"simulated", 0, tuple(self.swarm.nodes))
        self.liar = self.dice.choice([node for node in self.nodes if (node.me == leader) is leads])
        checks.liar = self.liar
        self.heard: dict[type[Message], Message] = {}  # the last of each kind that anybody sent
        self.told_at: dict[PeerId, float] = {}  # when a trick last sent each peer what nobody asked for
        self._out: dict[Node, set[int]] = {node: set() for node in self.nodes}
        self._averaged: dict[bytes, int] = {}
        self._send, self.swarm.send = self.swarm.send, self.send  # type: ignore[method-assign]
        self._acted, self.swarm.acted = self.swarm.acted, self.acted  # type: ignore[method-assign]

    @property
    def honest(self) -> list[Node]:
        return [node for node in self.nodes if node is not self.liar]

    def send(self, node: Node, peer: PeerId, message: Message) -> None:
        if node is not self.liar or self.trick is None:
            self.heard[type(message)] = message
            self._send(node, peer, message)
            return
        for seconds, each in self.trick(self, peer, message):
            if seconds:
                self.swarm.world.after(seconds, lambda each=each: self._send(node, peer, each))
            else:
                self._send(node, peer, each)

    def acted(self, node: Node, action: act.Action) -> None:
        self._acted(node, action)
        if node is self.liar:
            return
        if isinstance(action, act.Blame) and action.peer != node.me:
            self._out[self.swarm.nodes[action.peer]].add(node.machine.epoch)
        elif isinstance(action, act.Commit):
            self._averaged[action.lineage] = sum(action.samples)

    def run(self, seconds: float = SECONDS) -> Told:
        self.swarm.world.run(seconds, lambda: False)
        averaged = list(self._averaged.values())
        return Told(
            min(node.parameters.epoch for node in self.honest),
            dict(Counter({n.name: len(self._out[n]) for n in self.honest if self._out[n]})),
            max((_longest(self._out[n]) for n in self.honest), default=0),
            len(self._out[self.liar]),
            sum(averaged) / len(averaged) / self.swarm.target if averaged else 0.0,
        )


def _longest(epochs: set[int]) -> int:
    """How many follow on each other."""
    best = run = 0
    for epoch in range(max(epochs, default=-1) + 1):
        run = run + 1 if epoch in epochs else 0
        best = max(best, run)
    return best
