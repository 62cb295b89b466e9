"""Peers that nobody can dial in a round: who owns parts, and which links are needed."""

from __future__ import annotations

import pytest

from p2pavg.part import Part
from p2pavg.rounds.machine.actions import OpenJob, Send
from p2pavg.rounds.machine.core import Config
from p2pavg.rounds.machine.events import LocalProgress, PeerUp, Received
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.messages import Prepare, Refuse
from p2pavg.rounds.protocol.roles import PlanMember

REACHABLE, HIDDEN, OTHER_HIDDEN = (name * 20 for name in (b"a", b"b", b"c"))
LINEAGE = b"l" * 32


@pytest.mark.parametrize(
    ("hidden", "owning"),
    [
        ((False, False), (True, True, True)),
        ((True, False), (True, True, True)),
        ((True, True), (True, False, False)),
    ],
)
def test_two_that_nobody_can_dial_own_nothing(hidden: tuple[bool, ...], owning: tuple[bool, ...]) -> None:
    """Of two client-only members neither owns a part; one alone, which all have a link to, does."""
    plans: list[tuple[bool, ...]] = []

    def plan(members: list[PlanMember]) -> tuple[Part, ...]:
        plans.append(tuple(member.owns for member in members))
        return (Part(0, 0, 5),)

    machine = Machine(Config(me=REACHABLE, run_id="r", epoch=0, lineage=LINEAGE, target=10, plan=plan), 0.0)
    machine.core.sticky = REACHABLE
    for peer, client_only in zip((HIDDEN, OTHER_HIDDEN), hidden, strict=True):
        machine.handle(PeerUp(peer, 0, LINEAGE, client_only=client_only, leader=REACHABLE), 0.1)
    machine.handle(LocalProgress(10, 1.0, at_boundary=True), 0.2)
    assert plans[-1:] == [owning]


@pytest.mark.parametrize(("owner", "accepts"), [(0, True), (1, False), (2, False)])
def test_only_links_to_owners_are_needed(owner: int, accepts: bool) -> None:
    """A member takes part without a link to one that owns nothing, unless it owns a part itself."""
    machine = Machine(
        Config(me=HIDDEN, run_id="r", epoch=0, lineage=LINEAGE, target=10, plan=lambda members: ()), 0.0
    )
    machine.handle(PeerUp(REACHABLE, 0, LINEAGE, leader=REACHABLE), 0.1)
    members = (REACHABLE, HIDDEN, OTHER_HIDDEN)
    prepare = Prepare(Ballot(0, 0, REACHABLE, 1, LINEAGE), members, (True, True, True), ((owner, 0, 5),))
    actions = machine.handle(Received(REACHABLE, prepare), 0.2)
    refused = [a.message.missing for a in actions if isinstance(a, Send) and isinstance(a.message, Refuse)]
    assert any(isinstance(action, OpenJob) for action in actions) == accepts
    assert refused == ([] if accepts else [(OTHER_HIDDEN,)])
