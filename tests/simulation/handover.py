"""What a departing process does with its samples: they are offered to one receiver after the other, by
messages.

Each of these can be lost with its link: the offer, the answer to it, the end of the samples, and the answer
to that. Once the end is under way, only that answer tells whether the receiver has taken them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pavg.rounds.loop.handover import ANSWER_S, PAUSE_S
from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.machine import events as ev
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.protocol.ballot import Lineage, PeerId

if TYPE_CHECKING:
    from tests.simulation.trainer import Node, Sample

    Answered = Callable[[Node, Acceptance, int | None], None]


@dataclass(frozen=True)
class Handed:
    """A moment: the receiver has all of the samples, and its answer is under way."""

    giver: Node


class Handover:
    """The giver's side, and the receiver's answers."""

    def __init__(self, node: Node, action: act.HandOver) -> None:
        self.node = node
        self.samples: list[Sample] = []
        self.offered = action.offered
        self.behind = False
        self.counted_at: Lineage | None = None  # where the receiver stood that knew them to be averaged
        self.receivers = deque(action.receivers)
        self.later: deque[PeerId] = deque()
        self.asked: Node | None = None
        self.answered = False  # the offer
        self.ended = False  # the receiver may have taken them
        self.over = False
        self._begun = False

    def begin(self) -> None:
        """The training thread waits, with what it has accumulated."""
        if self._begun or not self.node.alive:
            return
        self._begun = True
        self.samples = list(self.node.contribution)
        if self.samples:
            self.ask()
        else:  # it was discarded, and named
            self._finish(ev.HandedOver(taken=False, behind=False))

    def ask(self) -> None:
        """The next receiver."""
        node = self.node
        if not node.alive or self.over:
            return
        while self.receivers:
            receiver = node.links.get(self.receivers.popleft())
            if receiver is not None:
                self._offer(receiver)
                return
        if not self.later:
            self._finish(ev.HandedOver(taken=False, behind=self.behind))
            return
        self.receivers, self.later = self.later, deque()
        node.world.after(PAUSE_S, lambda: node.do(self.ask))

    def _offer(self, receiver: Node) -> None:
        node, swarm = self.node, self.node.swarm
        self.asked, self.answered = receiver, False
        swarm.post(node, receiver, lambda: self._judged(receiver, self._answered))

        def forget() -> None:
            if self.asked is receiver and not self.answered:
                self._answered(receiver, Acceptance.LATER)

        node.world.after(ANSWER_S, lambda: node.do(forget))

    def _judged(self, receiver: Node, answered: Answered) -> None:
        """At the receiver: what it says, and in which transfer the samples are averaged already."""
        here, transfers = self.node.parameters, dict(self.offered)
        acceptance = receiver.machine.departure.acceptance(here.epoch, here.lineage, transfers)
        if acceptance is Acceptance.TAKEN and not receiver.machine.departure.can_have(len(self.samples)):
            acceptance = Acceptance.NEVER
        counted = receiver.machine.core.history.counted(here.epoch, transfers)
        if answered == self._taken and acceptance is Acceptance.TAKEN:
            self.node.swarm.handed(self.node, receiver, self.samples)
            receiver.inherit(self.samples, self.node.note)
            receiver.feed(ev.Inherited(here.epoch, self.offered))
        receiver.swarm.post(receiver, self.node, lambda: answered(receiver, acceptance, counted))
        if answered == self._taken:
            receiver.swarm.spring(receiver, Handed(self.node))

    def _answered(self, receiver: Node, acceptance: Acceptance, counted: int | None = None) -> None:
        """It will take them, or not."""
        if self.asked is not receiver or self.answered or self.over:
            return  # too late
        self.answered = True
        if acceptance is Acceptance.TAKEN:
            self.node.world.after(
                self.node.swarm.state_seconds, lambda: self.node.do(lambda: self._carried(receiver))
            )
            return
        self._refused(receiver, acceptance, counted)

    def _refused(self, receiver: Node, acceptance: Acceptance, counted: int | None) -> None:
        """The next one, unless it knows them to be averaged."""
        self.asked = None
        if acceptance is Acceptance.COUNTED and counted is not None:
            self.counted_at = receiver.machine.lineage
            self._finish(ev.HandedOver(taken=False, behind=self.behind, counted=counted))
            return
        self.behind |= acceptance is Acceptance.BEHIND
        if acceptance is Acceptance.LATER:
            self.later.append(receiver.me)
        self.ask()

    def _carried(self, receiver: Node) -> None:
        if self.asked is receiver and not self.over:
            self.ended = True
            self.node.swarm.post(self.node, receiver, lambda: self._judged(receiver, self._taken))

    def _taken(self, receiver: Node, acceptance: Acceptance, counted: int | None) -> None:
        """It has taken them, or not."""
        if self.asked is not receiver or self.over:
            return
        self.ended = False
        if acceptance is Acceptance.TAKEN:
            self.node.samples.clear()
            self._finish(ev.HandedOver(taken=True, behind=self.behind))
        else:
            self._refused(receiver, acceptance, counted)

    def lost(self, peer: PeerId) -> None:
        """The link to a peer is gone, and with it what was under way."""
        if self.asked is None or self.asked.me != peer or self.over:
            return
        if self.ended:
            self._finish(ev.HandedOver(taken=False, behind=self.behind, unknown=True))
        else:
            self.asked = None
            self.ask()

    def _finish(self, event: ev.HandedOver) -> None:
        self.over = True
        self.node.feed(event)
