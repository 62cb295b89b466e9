"""What a leaving process does with its samples: they are offered to one heir after the other, by messages.

Each of these can be lost with its link: the offer, the answer to it, the end of the samples, and the answer
to that. Once the end is under way, only that answer tells whether the heir has taken them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2pavg.rounds.loop.bequest import ANSWER_S, PAUSE_S
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.departure import Verdict
from p2pavg.rounds.protocol.ballot import PeerId

if TYPE_CHECKING:
    from tests.simulation.trainer import Node


class Bequest:
    """The giver's side, and the heir's answers."""

    def __init__(self, node: Node, action: act.Bequeath) -> None:
        self.node = node
        self.samples = list(node.contribution)
        self.heirs = deque(action.heirs)
        self.later: deque[PeerId] = deque()
        self.asked: Node | None = None
        self.answered = False  # the offer
        self.ended = False  # the heir may have taken them
        self.over = False

    def ask(self) -> None:
        """The next heir."""
        node = self.node
        if not node.alive or self.over:
            return
        while self.heirs:
            heir = node.links.get(self.heirs.popleft())
            if heir is not None:
                self._offer(heir)
                return
        if not self.later:
            self._finish(taken=False)
            return
        self.heirs, self.later = self.later, deque()
        node.world.after(PAUSE_S, lambda: node.do(self.ask))

    def _offer(self, heir: Node) -> None:
        node, swarm = self.node, self.node.swarm
        self.asked, self.answered = heir, False
        swarm.post(node, heir, lambda: self._judged(heir, self._answered))

        def forget() -> None:
            if self.asked is heir and not self.answered:
                self._answered(heir, Verdict.LATER)

        node.world.after(ANSWER_S, lambda: node.do(forget))

    def _judged(self, heir: Node, answered: Callable[[Node, Verdict], None]) -> None:
        """At the heir: what it says."""
        verdict = heir.machine.departure.verdict(self.node.parameters.epoch, self.node.parameters.lineage)
        if answered == self._taken and verdict is Verdict.TAKEN:
            self.node.swarm.handed(self.node, heir, self.samples)
            heir.inherit(self.samples)
        heir.swarm.post(heir, self.node, lambda: answered(heir, verdict))

    def _answered(self, heir: Node, verdict: Verdict) -> None:
        """It will take them, or not."""
        if self.asked is not heir or self.answered or self.over:
            return  # too late
        self.answered = True
        if verdict is Verdict.TAKEN:
            self.node.world.after(
                self.node.swarm.state_seconds, lambda: self.node.do(lambda: self._carried(heir))
            )
            return
        self.asked = None
        if verdict is Verdict.LATER:
            self.later.append(heir.me)
        self.ask()

    def _carried(self, heir: Node) -> None:
        if self.asked is heir and not self.over:
            self.ended = True
            self.node.swarm.post(self.node, heir, lambda: self._judged(heir, self._taken))

    def _taken(self, heir: Node, verdict: Verdict) -> None:
        """It has taken them, or not."""
        if self.asked is not heir or self.over:
            return
        self.ended, self.asked = False, None
        if verdict is Verdict.TAKEN:
            self._finish(taken=True)
            return
        if verdict is Verdict.LATER:
            self.later.append(heir.me)
        self.ask()

    def lost(self, peer: PeerId) -> None:
        """The link to a peer is gone, and with it what was under way."""
        if self.asked is None or self.asked.me != peer or self.over:
            return
        if self.ended:
            self._finish(taken=False)
        else:
            self.asked = None
            self.ask()

    def _finish(self, *, taken: bool) -> None:
        self.over = True
        if taken:
            self.node.samples.clear()
        self.node.feed(ev.Bequeathed(taken))
