"""How much peers say to each other when nothing happens: nobody answers an answer for ever."""

from __future__ import annotations

from collections import deque

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Send
from p2pavg.rounds.machine.core import Config
from p2pavg.rounds.machine.events import Event, Leave, LocalProgress, PeerUp, Received
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Follow, Message

ONE, TWO = (name * 20 for name in (b"a", b"b"))
LINEAGE = b"l" * 32


class Pair:
    """Two machines; all that they say arrives at once, twice if `twice`. The clock moves only by hand."""

    def __init__(self, *, twice: bool = False) -> None:
        self.machines = {
            me: Machine(
                Config(
                    me=me,
                    run_id="r",
                    epoch=0,
                    lineage=LINEAGE,
                    target=12,
                    plan=lambda members: Plan((Part(0, 0, 5),)),
                ),
                0.0,
            )
            for me in (ONE, TWO)
        }
        self.copies = 2 if twice else 1
        self.now = 0.1
        self.said: list[tuple[bytes, Message]] = []
        self._queue: deque[tuple[bytes, Event]] = deque()

    def feed(self, me: bytes, event: Event, most: int = 200) -> None:
        """And all that follows. Fails after `most` messages."""
        self._queue.append((me, event))
        before = len(self.said)
        while self._queue:
            to, given = self._queue.popleft()
            for action in self.machines[to].handle(given, self.now):
                if isinstance(action, Send):
                    self.said.append((to, action.message))
                    assert len(self.said) - before < most, "they never fall silent"
                    self._queue.extend([(action.peer, Received(to, action.message))] * self.copies)


@pytest.mark.parametrize("twice", [False, True])
def test_two_that_leave_fall_silent(twice: bool) -> None:
    """Each takes the other for the leader, as it leaves itself: they say so, and then say nothing."""
    pair = Pair(twice=twice)
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.machines[me].core.here.pending = True  # so that it does not leave at once
        pair.feed(me, Leave(5.0, hand_over=True))
        pair.feed(me, PeerUp(other, 0, LINEAGE, leader=me))
    for _ in range(3):
        pair.now += 0.01
        for me in (ONE, TWO):
            pair.feed(me, LocalProgress(4, 1.0, at_boundary=False), most=20)
    assert {one.leader for one in pair.machines.values()} == {ONE, TWO}
    assert not [message for _, message in pair.said if isinstance(message, Follow)]


def test_of_two_that_defer_to_each_other_one_leads() -> None:
    """Both were late to apply the last average, and gave the lead away: they agree at once on one of them."""
    pair = Pair()
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(other, 0, LINEAGE))
    for me in (ONE, TWO):
        core = pair.machines[me].core
        core.sticky = None
        core.epoch_state.suspects.add(me)
    for me in (ONE, TWO):
        pair.feed(me, LocalProgress(4, 1.0, at_boundary=False))
    assert len({one.leader for one in pair.machines.values()}) == 1


def test_who_is_out_of_the_epoch_gives_the_lead_away() -> None:
    """Each takes the other for the leader, and the one that both would choose is out of the epoch, which the
    other one does not know: it is told, and leads at once.
    """
    pair = Pair()
    chosen = rendezvous(pair.machines[ONE].core.run, 0, (ONE, TWO))
    other = TWO if chosen == ONE else ONE
    for me, peer in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(peer, 0, LINEAGE, leader=chosen))
    pair.machines[chosen].core.exclude(chosen, Cause.COMPLAINT)
    for me in (ONE, TWO):
        pair.feed(me, LocalProgress(4, 1.0, at_boundary=False), most=20)
    assert {one.leader for one in pair.machines.values()} == {other}


def test_two_that_are_late_settle_the_lead_once() -> None:
    """Both have yet to apply the last average, and the round could begin: the one that both choose waits for
    itself, instead of giving the lead away at once to the other one, which gives it back.
    """
    pair = Pair()
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(other, 0, LINEAGE))
    for me in (ONE, TWO):
        core = pair.machines[me].core
        core.sticky, core.here.pending, core.epoch_state.begun_before = None, True, True
        core.here.began_at = -10.0
        core.epoch_state.suspects.add(me)
        for facts in core.linked:
            facts.committed_at = -10.0  # nobody is waited for any more
    for _ in range(3):
        pair.now += 0.01
        for me in (ONE, TWO):
            pair.feed(me, LocalProgress(4, 1.0, at_boundary=False), most=40)
