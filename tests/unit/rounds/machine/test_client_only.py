"""Peers that nobody can dial in a round: who owns parts, and which links are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import OpenJob, Send
from p2pavg.rounds.machine.events import LocalProgress, PeerUp, Received
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
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

    def plan(members: list[PlanMember]) -> Plan:
        plans.append(tuple(member.owns for member in members))
        return Plan((Part(0, 0, 5),))

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
        Config(me=HIDDEN, run_id="r", epoch=0, lineage=LINEAGE, target=10, plan=lambda members: Plan(())), 0.0
    )
    machine.handle(PeerUp(REACHABLE, 0, LINEAGE, leader=REACHABLE), 0.1)
    members = (REACHABLE, HIDDEN, OTHER_HIDDEN)
    prepare = Prepare(
        Ballot(0, 0, REACHABLE, 1, LINEAGE), members, (True, True, True), Plan((Part(owner, 0, 5),))
    )
    actions = machine.handle(Received(REACHABLE, prepare), 0.2)
    refused = [a.message.missing for a in actions if isinstance(a, Send) and isinstance(a.message, Refuse)]
    assert any(isinstance(action, OpenJob) for action in actions) == accepts
    assert refused == ([] if accepts else [(OTHER_HIDDEN,)])


def standing_at(me: bytes, plan: Any, *, client_only: bool = False) -> Machine:
    config = Config(
        me=me, run_id="r", epoch=0, lineage=LINEAGE, target=10, plan=plan, client_only=client_only
    )
    return Machine(config, 0.0)


def owners(*ups: PeerUp, told: dict[bytes, tuple[bytes, ...]]) -> tuple[bool, ...]:
    """Who owns parts in the plan of REACHABLE, after others said whom they have met."""
    plans: list[tuple[bool, ...]] = []

    def plan(members: list[PlanMember]) -> Plan:
        plans.append(tuple(member.owns for member in members))
        return Plan((Part(0, 0, 5),))

    machine = standing_at(REACHABLE, plan)
    machine.core.sticky = REACHABLE
    for up in ups:
        machine.handle(up, 0.1)
        own = standing_at(up.peer, plan)
        progress = replace(own.core.progress(), leader=REACHABLE, met=told.get(up.peer, ()))
        machine.handle(Received(up.peer, progress), 0.1)
    machine.handle(LocalProgress(10, 1.0, at_boundary=True), 0.2)
    return plans[-1]


@pytest.mark.parametrize(
    ("told", "owning"),
    [
        ({HIDDEN: (OTHER_HIDDEN,), OTHER_HIDDEN: (HIDDEN,)}, (True, True, True)),
        ({HIDDEN: (OTHER_HIDDEN,)}, (True, False, False)),
        ({}, (True, False, False)),
    ],
)
def test_two_that_have_met_own_parts(told: dict[bytes, tuple[bytes, ...]], owning: tuple[bool, ...]) -> None:
    """Of two that nobody can dial both own parts once both say that they have a link to each other."""
    ups = [PeerUp(peer, 0, LINEAGE, client_only=True, leader=REACHABLE) for peer in (HIDDEN, OTHER_HIDDEN)]
    assert owners(*ups, told=told) == owning


def test_a_relay_carries_gradients_where_nobody_else_reaches_both() -> None:
    """Two that are linked by relay alone own parts both; a third with links to both leads, and owns all."""
    ups = [PeerUp(HIDDEN, 0, LINEAGE, relayed=True, leader=REACHABLE)]
    assert owners(*ups, told={}) == (True, True)
    machine = standing_at(REACHABLE, lambda members: ())
    machine.core.sticky = REACHABLE
    machine.handle(ups[0], 0.1)
    assert machine.core.leader() in (REACHABLE, HIDDEN)
    machine.handle(PeerUp(OTHER_HIDDEN, 0, LINEAGE, leader=REACHABLE), 0.2)
    assert machine.core.leader() == OTHER_HIDDEN
    assert machine.core.progress().apart == (HIDDEN,)


def test_whom_it_has_met_is_told() -> None:
    """A peer that nobody can dial tells of direct links to such peers, and counts relayed ones as lacking."""
    machine = standing_at(HIDDEN, lambda members: (), client_only=True)
    machine.handle(PeerUp(OTHER_HIDDEN, 0, LINEAGE, client_only=True), 0.1)
    machine.handle(PeerUp(REACHABLE, 0, LINEAGE), 0.1)
    assert (machine.core.progress().met, machine.core.progress().apart) == ((OTHER_HIDDEN,), ())
    machine.handle(PeerUp(OTHER_HIDDEN, 0, LINEAGE, client_only=True, relayed=True), 0.2)
    assert (machine.core.progress().met, machine.core.progress().apart) == ((), (OTHER_HIDDEN,))
