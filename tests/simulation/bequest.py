"""What a leaving process does with its samples: they are offered to one heir after the other, by messages.

Each of these can be lost with its link: the offer, the answer to it, the end of the samples, and the answer
to that. Once the end is under way, only that answer tells whether the heir has taken them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pavg.rounds.loop.bequest import ANSWER_S, PAUSE_S
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.departure import Verdict
from p2pavg.rounds.protocol.ballot import Lineage, PeerId

if TYPE_CHECKING:
    from tests.simulation.trainer import Node

    Answered = Callable[[Node, Verdict, int | None], None]


@dataclass(frozen=True)
class Handed:
    """A moment: the heir has all of the samples, and its answer is under way."""

    giver: Node


class Bequest:
    """The giver's side, and the heir's answers."""

    def __init__(self, node: Node, action: act.Bequeath) -> None:
        self.node = node
        self.samples = list(node.contribution)
        self.offered = action.offered
        self.behind = False
        self.counted_at: Lineage | None = None  # where the heir stood that knew them to be averaged
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
            self._finish(ev.Bequeathed(taken=False, behind=self.behind))
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

    def _judged(self, heir: Node, answered: Answered) -> None:
        """At the heir: what it says, and in which transfer the samples are averaged already."""
        here, transfers = self.node.parameters, dict(self.offered)
        verdict = heir.machine.departure.verdict(here.epoch, here.lineage, transfers)
        if verdict is Verdict.TAKEN and not heir.machine.departure.can_have(len(self.samples)):
            verdict = Verdict.NEVER
        counted = heir.machine.core.history.counted(here.epoch, transfers)
        if answered == self._taken and verdict is Verdict.TAKEN:
            self.node.swarm.handed(self.node, heir, self.samples)
            heir.inherit(self.samples)
            heir.feed(ev.Inherited(here.epoch, self.offered))
        heir.swarm.post(heir, self.node, lambda: answered(heir, verdict, counted))
        if answered == self._taken:
            heir.swarm.spring(heir, Handed(self.node))

    def _answered(self, heir: Node, verdict: Verdict, counted: int | None = None) -> None:
        """It will take them, or not."""
        if self.asked is not heir or self.answered or self.over:
            return  # too late
        self.answered = True
        if verdict is Verdict.TAKEN:
            self.node.world.after(
                self.node.swarm.state_seconds, lambda: self.node.do(lambda: self._carried(heir))
            )
            return
        self._refused(heir, verdict, counted)

    def _refused(self, heir: Node, verdict: Verdict, counted: int | None) -> None:
        """The next one, unless it knows them to be averaged."""
        self.asked = None
        if verdict is Verdict.COUNTED and counted is not None:
            self.counted_at = heir.machine.lineage
            self._finish(ev.Bequeathed(taken=False, behind=self.behind, counted=counted))
            return
        self.behind |= verdict is Verdict.BEHIND
        if verdict is Verdict.LATER:
            self.later.append(heir.me)
        self.ask()

    def _carried(self, heir: Node) -> None:
        if self.asked is heir and not self.over:
            self.ended = True
            self.node.swarm.post(self.node, heir, lambda: self._judged(heir, self._taken))

    def _taken(self, heir: Node, verdict: Verdict, counted: int | None) -> None:
        """It has taken them, or not."""
        if self.asked is not heir or self.over:
            return
        self.ended = False
        if verdict is Verdict.TAKEN:
            self.node.samples.clear()
            self._finish(ev.Bequeathed(taken=True, behind=self.behind))
        else:
            self._refused(heir, verdict, counted)

    def lost(self, peer: PeerId) -> None:
        """The link to a peer is gone, and with it what was under way."""
        if self.asked is None or self.asked.me != peer or self.over:
            return
        if self.ended:
            self._finish(ev.Bequeathed(taken=False, behind=self.behind, unknown=True))
        else:
            self.asked = None
            self.ask()

    def _finish(self, event: ev.Bequeathed) -> None:
        self.over = True
        self.node.feed(event)
