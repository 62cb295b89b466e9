"""What a peer tells or asks everybody: as many messages as there are peers, however many links change."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Send
from p2pavg.rounds.machine.events import Apart, PeerUp, Received, Tick
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.rules.deadlines import LINKS_TOLD
from p2pavg.rounds.protocol.ballot import Ballot, PeerId, Stage
from p2pavg.rounds.protocol.messages import Inquire, Progress, Unknown
from p2pavg.rounds.protocol.roles import Seat

ME, LEADER = b"m" * 20, b"l" * 20
OTHERS = [bytes([1 + number]) * 20 for number in range(40)]
HERE, AHEAD = b"h" * 32, b"a" * 32


def machine() -> Machine:
    return Machine(
        Config(me=ME, run_id="r", epoch=0, lineage=HERE, target=12, plan=lambda _: Plan((Part(0, 0, 5),))),
        0.0,
    )


@pytest.mark.parametrize("how", ["relayed", "apart"])
def test_many_links_that_change_are_told_in_two_words(how: str) -> None:
    """Forty links come by a relay, or are given up, within 40 ms: everybody hears of the first at once, and
    of all after a quarter of a second.
    """
    one, told = machine(), Counter[PeerId]()
    last: dict[PeerId, Progress] = {}

    def feed(event: PeerUp | Apart | Tick, now: float) -> None:
        for action in one.handle(event, now):
            if isinstance(action, Send) and isinstance(action.message, Progress):
                told[action.peer] += 1
                last[action.peer] = action.message

    feed(PeerUp(LEADER, 0, HERE, leader=LEADER), 0.1)
    told.clear()
    for number, peer in enumerate(OTHERS):
        at = 1.0 + number / 1000
        relayed = how == "relayed"
        feed(PeerUp(peer, 0, HERE, relayed=True) if relayed else Apart(frozenset(OTHERS[: number + 1])), at)
    feed(Tick(), 1.0 + LINKS_TOLD)
    assert last[LEADER].apart == tuple(OTHERS)
    assert max(told.values()) <= 3


def test_some_of_those_ahead_are_asked_about_a_ballot_and_the_others_if_they_are_mute() -> None:
    """First its members. Nobody is asked twice; when nobody answers, this peer gives up, as it did."""
    one = machine()
    one.handle(PeerUp(LEADER, 0, HERE, leader=LEADER), 0.1)
    ballot = Ballot(0, 0, LEADER, 1, HERE)
    seats = tuple(Seat(peer, True) for peer in (ME, LEADER, OTHERS[-1]))
    one.core.promises.add(ballot)
    one.core.hold(Holding(ballot, seats, 0, Plan((Part(0, 0, 5),)), 0.1, Stage.OPEN, begun=True))
    asked: list[PeerId] = []

    def feed(event: PeerUp | Received | Tick, now: float) -> None:
        sends = [action for action in one.handle(event, now) if isinstance(action, Send)]
        asked.extend(s.peer for s in sends if isinstance(s.message, Inquire) and s.peer in OTHERS)

    one.core.linked.up(PeerUp(OTHERS[-1], 1, AHEAD))
    for peer in OTHERS[:-1]:
        one.core.linked.up(PeerUp(peer, 1, AHEAD))
    feed(Tick(), 0.2)
    assert asked[0] == OTHERS[-1]
    assert len(asked) == 4
    for tenth in range(3, 30):
        feed(Tick(), tenth / 10)
        if len(asked) > 4:
            break
    assert sorted(asked) == sorted(OTHERS)
    assert one.core.holding is not None
    feed(Received(OTHERS[0], Unknown(ballot, 1, AHEAD)), one.core.now + 0.01)
    assert one.core.holding is None
    assert one.core.here.joining == (1, AHEAD)
