"""What a ballot names, in all lives of its leader and in all lineages, and whose word about it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, CancelJob, Commit, Discarded, OpenJob, Send
from p2pavg.rounds.machine.events import Healed, JobDone, LocalProgress, PeerDown, PeerUp, Received
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Ballot, Held, Stage
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import (
    Aborted,
    Begin,
    Committed,
    Inquire,
    Message,
    Prepare,
    Promise,
    Query,
    Ready,
    Refuse,
)
from p2pavg.rounds.protocol.roles import Generation
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

ME, LEADER, OTHER, THIRD = (name * 20 for name in (b"a", b"b", b"c", b"d"))
LINEAGE, ELSEWHERE = b"l" * 32, b"m" * 32
DIGESTS = (b"d" * 32,)
BALLOT = Ballot(0, 0, LEADER, 1, LINEAGE)
WEIGHTS, SAMPLES = (4.0, 4.0, 4.0), (4, 4, 4)


def machine(life: int = 0) -> Machine:
    return Machine(
        Config(
            me=ME,
            run_id="r",
            epoch=0,
            lineage=LINEAGE,
            target=12,
            plan=lambda members: Plan((Part(0, 0, 5),)),
            life=life,
        ),
        0.0,
    )


def opened(actions: list[Action]) -> OpenJob:
    return next(action for action in actions if isinstance(action, OpenJob))


def sent(actions: list[Action], kind: type[Message]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def done() -> Machine:
    """It has told the leader that it is DONE in `BALLOT`."""
    member = machine()
    for peer in (LEADER, OTHER, THIRD):
        member.handle(PeerUp(peer, 0, LINEAGE, leader=LEADER), 0.1)
    members = (ME, LEADER, OTHER)
    member.handle(LocalProgress(4, 1.0, at_boundary=True), 0.2)
    member.handle(Received(LEADER, Prepare(BALLOT, members, (True,) * 3, Plan((Part(1, 0, 5),)))), 0.3)
    member.handle(Received(LEADER, Begin(BALLOT, WEIGHTS, SAMPLES, (1, 1, 1), b"")), 0.4)
    member.handle(JobDone(BALLOT.transfer, DIGESTS), 0.5)
    held = member.core.holding
    assert held is not None
    assert held.stage is Stage.DONE
    return member


def test_two_lives_of_a_leader_share_no_ballot() -> None:
    """A leader that comes back where it stood opens the same attempt again, as another ballot."""
    wait = LocalProgress(12, 1.0, at_boundary=True)
    first, second = (opened(machine(life).handle(wait, 0.1)) for life in (1000, 2000))
    assert (first.ballot.epoch, first.ballot.attempt) == (second.ballot.epoch, second.ballot.attempt)
    assert first.ballot < second.ballot
    assert first.transfer != second.transfer


@pytest.mark.parametrize("clock_went_back", [False, True])
def test_a_leader_that_came_back_voids_no_ballot_of_its_earlier_life(clock_went_back: bool) -> None:
    """A member is DONE in that ballot, which may be committed: the voters are asked, whatever the clock says
    of which life is later.
    """
    earlier = Ballot(0, 0, ME, 10**18 + 1, LINEAGE)
    leader = machine(life=10**18 + (-1 if clock_went_back else 1) * 10**14)
    leader.core.follow(ME)
    for peer in (OTHER, THIRD):
        leader.handle(PeerUp(peer, 0, LINEAGE, leader=ME), 0.1)
    ballot = opened(leader.handle(LocalProgress(12, 1.0, at_boundary=True), 0.2)).ballot
    held = Held(earlier, Stage.DONE, True, DIGESTS, (ME, OTHER, THIRD), WEIGHTS, SAMPLES)
    actions = leader.handle(Received(OTHER, Promise(ballot, held, ballot)), 0.3)
    assert not [send for send in sent(actions, Aborted) if send.message.ballot == earlier]
    assert {send.peer for send in sent(actions, Query)} == {OTHER, THIRD}


def test_a_life_never_opens_a_ballot_twice() -> None:
    """Who heals away from a lineage, and back to it, leads its first attempt there with a new ballot."""
    peer = machine(life=1000)
    wait = LocalProgress(12, 1.0, at_boundary=True)
    first = opened(peer.handle(wait, 0.1))
    peer.abandon_round("it heals")
    peer.handle(Healed(0, ELSEWHERE, (), dropped=12), 0.2)
    peer.handle(Healed(0, LINEAGE, (), dropped=0), 0.3)
    second = opened(peer.handle(wait, 0.4))
    assert first.ballot.standing == second.ballot.standing
    assert first.transfer != second.transfer


def test_a_promise_outlives_a_stay_elsewhere() -> None:
    """Who heals to another lineage, and back, still refuses what is below its last promise there."""
    member = done()
    member.abandon_round("it heals")
    member.handle(Healed(0, ELSEWHERE, (), dropped=4), 0.6)
    member.handle(Healed(0, LINEAGE, (), dropped=0), 0.7)
    again = Prepare(BALLOT, (ME, LEADER, OTHER), (True,) * 3, Plan((Part(1, 0, 5),)))
    assert [send.message.objection for send in sent(member.handle(Received(LEADER, again), 0.8), Refuse)] == [  # type: ignore[union-attr]
        "promised"
    ]


def test_samples_of_two_lives_are_told_apart() -> None:
    """A leader died after BEGIN, and its round was committed; its next life contributed other samples to the
    same attempt, and loses them when it heals: all of them are named.
    """
    wait = LocalProgress(12, 1.0, at_boundary=True)
    before = opened(machine(life=1000).handle(wait, 0.1))
    second = machine(life=2000)
    own = opened(second.handle(wait, 0.1))
    commit = next(a for a in second.handle(JobDone(own.transfer, DIGESTS), 0.2) if isinstance(a, Commit))
    assert commit.samples == (12,)
    history = (Generation(0, ELSEWHERE, before.transfer, 12, 12, ME),)
    actions = second.handle(Healed(1, ELSEWHERE, history, dropped=12), 0.3)
    assert [action.samples for action in actions if isinstance(action, Discarded)] == [12]


def test_what_is_said_of_another_lineage_undoes_nothing() -> None:
    """ABORTED for the same attempt of another lineage: who told DONE stays DONE, and commits."""
    member = done()
    other = replace(BALLOT, lineage=ELSEWHERE)
    member.handle(Received(LEADER, Aborted(other, other, Cause.COMPLAINT, "why", (), False)), 0.6)
    actions = member.handle(Received(LEADER, Committed(BALLOT, WEIGHTS, SAMPLES, DIGESTS)), 0.7)
    assert any(isinstance(action, Commit) for action in actions)


def test_a_round_of_another_lineage_is_not_resolved() -> None:
    """A member answers a proposal with what it held on another lineage: the round goes on."""
    leader = machine()
    leader.core.sticky = ME
    leader.handle(PeerUp(OTHER, 0, LINEAGE, leader=ME), 0.1)
    ballot = opened(leader.handle(LocalProgress(12, 1.0, at_boundary=True), 0.2)).ballot
    stale = Held(replace(BALLOT, lineage=ELSEWHERE), Stage.DONE, True, DIGESTS, (OTHER,), (4.0,), (4,))
    leader.handle(Received(OTHER, Promise(ballot, stale, ballot)), 0.3)
    assert sent(leader.handle(Received(OTHER, Ready(ballot, 1, 4, 4.0, b"", 0.0, 0)), 0.4), Begin)


@pytest.mark.parametrize(
    ("teller", "by"),
    [
        (OTHER, BALLOT),
        (OTHER, Ballot(0, 9, OTHER, 1, LINEAGE)),
        (OTHER, Ballot(0, 9, THIRD, 1, LINEAGE)),
        (THIRD, Ballot(0, 9, OTHER, 1, LINEAGE)),
        (LEADER, Ballot(0, 9, OTHER, 1, LINEAGE)),
    ],
)
def test_nobody_else_aborts_a_round(teller: bytes, by: Ballot) -> None:
    """ABORTED counts from the leader of the ballot, in its own name, and from a promised successor."""
    member = done()
    actions = member.handle(
        Received(teller, Aborted(BALLOT, by, Cause.COMPLAINT, "because", (LEADER,), True)), 0.6
    )
    assert not any(isinstance(action, CancelJob) for action in actions)
    assert not member.core.epoch_state.excluded
    member.handle(Received(LEADER, Aborted(BALLOT, BALLOT, Cause.COMPLAINT, "because", (OTHER,), False)), 0.7)
    assert member.core.holding is None
    assert OTHER in member.core.epoch_state.excluded


@pytest.mark.parametrize("word", [Aborted, Committed])
def test_a_successor_decides_once_it_was_promised(word: type[Message]) -> None:
    """The word of a successor counts after we promised it the decision, and not before."""
    member, successor = done(), Ballot(0, 1, OTHER, 7, LINEAGE)
    decided: Message = Aborted(BALLOT, successor, Cause.COMPLAINT, "its leader was lost", (), False)
    if word is Committed:
        decided = Committed(BALLOT, WEIGHTS, SAMPLES, DIGESTS)
    member.handle(Received(OTHER, decided), 0.6)
    assert member.core.holding is not None
    member.handle(PeerDown(LEADER, "gone"), 0.7)
    assert sent(member.handle(Received(OTHER, Query(successor)), 0.8), Promise)
    member.handle(Received(OTHER, decided), 0.9)
    assert member.core.holding is None
    assert member.epoch == (1 if word is Committed else 0)


@pytest.mark.parametrize("given_up", [False, True])
def test_what_a_successor_was_told_holds_until_it_gives_up(given_up: bool) -> None:
    """DONE was told to a successor. A question of our own does not make that void: a word from below
    the successor's ballot undoes nothing, unless the successor gave its question up.
    """
    member, successor = done(), Ballot(0, 1, OTHER, 7, LINEAGE)
    member.handle(PeerDown(LEADER, "gone"), 0.6)
    assert sent(member.handle(Received(OTHER, Query(successor)), 0.7), Promise)
    if given_up:
        member.handle(
            Received(OTHER, Aborted(successor, successor, Cause.COMPLAINT, "given up", (), False)), 0.8
        )
    member.core.promises.released = True  # as after a question of our own
    held = member.core.holding
    assert held is not None
    held.asked.add(THIRD)
    member.handle(Received(THIRD, Aborted(BALLOT, BALLOT, Cause.COMPLAINT, "because", (), False)), 0.9)
    assert (member.core.holding is held) is not given_up


def test_who_hears_of_a_commit_from_anybody_asks_the_leader() -> None:
    """COMMITTED from another member is only a reason to ask; whoever was asked is believed."""
    member, fact = done(), Committed(BALLOT, WEIGHTS, SAMPLES, DIGESTS)
    asked = sent(member.handle(Received(OTHER, fact), 0.6), Inquire)
    assert [send.peer for send in asked] == [LEADER]
    assert member.epoch == 0
    member.handle(Received(LEADER, fact), 0.7)
    assert member.epoch == 1


def test_a_member_that_cries_abort_costs_nothing() -> None:
    """A bad member answers each proposal with ABORTED in a higher ballot's name, to everybody: the others
    commit as many epochs as without it.
    """
    epochs = []
    for bad in (False, True):
        calm = Calm(5)
        calm.epochs(2)
        liar = next(node for node in calm.nodes if node is not calm.leader)
        acted = calm.swarm.acted

        def lies(node: Node, action: Action, liar: Node = liar, acted=acted, calm: Calm = calm) -> None:  # type: ignore[no-untyped-def]
            acted(node, action)
            if isinstance(action, OpenJob) and node is liar:
                ballot = action.ballot
                by = replace(ballot, attempt=ballot.attempt + 99, leader=liar.me)
                for peer in (n.me for n in calm.nodes if n is not liar):
                    calm.swarm.send(
                        liar, peer, Aborted(ballot, by, Cause.COMPLAINT, "bad", (ballot.leader,), True)
                    )

        if bad:
            calm.swarm.acted = lies  # type: ignore[method-assign]
        calm.run(10.0)
        epochs.append(calm.leader.machine.epoch)
        assert not [trace for _, _, trace in calm.traced if trace.kind == "excluded"]
    assert epochs[1] > 0.9 * epochs[0] > 0
