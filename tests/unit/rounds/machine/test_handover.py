"""What a departing peer says of its last rounds, and how its receivers tell which of its samples are
averaged already.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, Discarded, HandOver, Send
from p2pavg.rounds.machine.departure import Acceptance
from p2pavg.rounds.machine.events import (
    Applied,
    HandedOver,
    Healed,
    Inherited,
    JobDone,
    Leave,
    LocalProgress,
    PeerDown,
    PeerUp,
    Received,
)
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Ballot, Held, Stage
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Aborted, Begin, Committed, Departing, Prepare
from p2pavg.rounds.protocol.roles import Generation

ME, LEADER, OTHER = (name * 20 for name in (b"a", b"b", b"c"))
LINEAGE, ELSEWHERE, DIGESTS = b"l" * 32, b"m" * 32, (b"d" * 32,)
BALLOT = Ballot(0, 0, LEADER, 1, LINEAGE)
WEIGHTS, SAMPLES = (4.0, 5.0, 6.0), (4, 5, 6)
FACT = Committed(BALLOT, WEIGHTS, SAMPLES, DIGESTS)
VOID = Aborted(BALLOT, BALLOT, Cause.COMPLAINT, "because", (), False)


def member(*, done: bool = True) -> Machine:
    """It contributed four samples to `BALLOT`, and has, or has not, the result."""
    made = Machine(
        Config(
            me=ME,
            run_id="r",
            epoch=0,
            lineage=LINEAGE,
            target=12,
            plan=lambda members: Plan((Part(0, 0, 5),)),
        ),
        0.0,
    )
    for peer in (LEADER, OTHER):
        made.handle(PeerUp(peer, 0, LINEAGE, leader=LEADER), 0.1)
    made.handle(LocalProgress(4, 1.0, at_boundary=True), 0.2)
    made.handle(
        Received(LEADER, Prepare(BALLOT, (ME, LEADER, OTHER), (True,) * 3, Plan((Part(1, 0, 5),)))), 0.3
    )
    made.handle(Received(LEADER, Begin(BALLOT, WEIGHTS, SAMPLES, (1, 1, 1), b"")), 0.4)
    if done:
        made.handle(JobDone(BALLOT.transfer, DIGESTS), 0.5)
    return made


def words(actions: Sequence[Action]) -> tuple[Held, ...]:
    """Of the first DEPARTING."""
    return next(a.message.held for a in actions if isinstance(a, Send) and isinstance(a.message, Departing))


def handover(actions: Sequence[Action]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    return [(a.samples, a.offered) for a in actions if isinstance(a, HandOver)]


def named(actions: Sequence[Action]) -> list[tuple[int, str]]:
    return [(action.samples, action.why) for action in actions if isinstance(action, Discarded)]


def test_the_last_words_tell_of_a_round_that_was_void() -> None:
    """The handover names the transfer that had the samples, and DEPARTING that the round was aborted."""
    departing = member()
    departing.handle(Received(LEADER, VOID), 0.6)
    actions = departing.handle(Leave(5.0, hand_over=True), 0.7)
    assert [(held.ballot, held.stage) for held in words(actions)] == [(BALLOT, Stage.ABORTED)]
    assert handover(actions) == [(4, ((BALLOT.transfer, 4),))]


def test_the_last_words_tell_of_the_last_average() -> None:
    """A member that applied the round says that it is committed, and hands over only what it counted
    since.
    """
    departing = member()
    departing.handle(Received(LEADER, FACT), 0.6)
    departing.handle(Applied(1, departing.lineage), 0.7)
    departing.handle(LocalProgress(3, 1.0, at_boundary=True), 0.8)
    actions = departing.handle(Leave(5.0, hand_over=True), 0.9)
    assert [(held.ballot, held.stage, held.weights) for held in words(actions)] == [
        (BALLOT, Stage.COMMITTED, WEIGHTS)
    ]
    assert handover(actions) == [(3, ())]


def test_who_knows_that_its_samples_count_gives_nothing_away() -> None:
    """The others committed a round with our samples, of which our copy was not whole: only what was counted
    since is lost, and named.
    """
    departing = member(done=False)
    departing.handle(Received(LEADER, FACT), 0.6)
    departing.handle(LocalProgress(7, 1.0, at_boundary=False), 0.7)
    actions = departing.handle(Leave(5.0, hand_over=True), 0.8)
    assert handover(actions) == []
    assert named(actions) == [(3, "left")]


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        (HandedOver(taken=True), []),
        (HandedOver(taken=False, counted=BALLOT.transfer), []),
        (HandedOver(taken=False, counted=77), [(4, "left")]),
        (HandedOver(taken=False, unknown=True), [(4, "left, and its receiver may have them")]),
        (HandedOver(taken=False, behind=True), [(4, "left, behind the others")]),
    ],
)
def test_what_is_named_depends_on_the_answer(answer: HandedOver, lost: list[tuple[int, str]]) -> None:
    """Taken or counted samples are not lost; all others are named."""
    departing = member()
    departing.handle(Received(LEADER, VOID), 0.6)
    departing.handle(Leave(5.0, hand_over=True), 0.7)
    assert named(departing.handle(answer, 0.8)) == lost


def test_samples_of_another_lineage_are_not_among_what_was_offered() -> None:
    """Who healed away from a round lost what it gave there: a later handover does not speak of it."""
    departing = member()
    departing.abandon_round("it heals")
    departing.handle(Healed(0, ELSEWHERE, (), dropped=4), 0.6)
    departing.handle(LocalProgress(2, 1.0, at_boundary=False), 0.7)
    departing.handle(PeerUp(OTHER, 0, ELSEWHERE), 0.8)
    assert handover(departing.handle(Leave(5.0, hand_over=True), 0.9)) == [(2, ())]


def test_a_receiver_waits_while_it_holds_the_round_itself() -> None:
    """DONE in a round that had the samples: it answers later; once that is void, it takes them; once it is
    committed, they count already.
    """
    receiver, offered = member(), {BALLOT.transfer: 5}
    assert receiver.departure.acceptance(0, LINEAGE, offered) is Acceptance.LATER
    assert receiver.departure.acceptance(0, LINEAGE, {77: 5}) is Acceptance.TAKEN
    receiver.handle(Received(LEADER, VOID), 0.6)
    assert receiver.departure.acceptance(0, LINEAGE, offered) is Acceptance.TAKEN
    receiver = member()
    receiver.handle(Received(LEADER, FACT), 0.6)
    assert receiver.departure.acceptance(0, LINEAGE, offered) is Acceptance.COUNTED


def test_a_receiver_answers_for_what_the_departing_peer_offered() -> None:
    """It heals to a lineage in which the round is committed that both had contributed to: none is lost."""
    receiver = member()
    receiver.handle(Received(LEADER, VOID), 0.6)
    receiver.handle(Inherited(0, ((BALLOT.transfer, 5),)), 0.7)
    history = (Generation(0, ELSEWHERE, BALLOT.transfer, 15, 15, LEADER),)
    assert named(receiver.handle(Healed(1, ELSEWHERE, history, dropped=4 + 5 + 2), 0.8)) == [(2, "healed")]


@pytest.mark.parametrize("stage", [Stage.OPEN, Stage.DONE, Stage.ABORTED, Stage.COMMITTED, None])
@pytest.mark.parametrize("before", [True, False])
def test_what_a_departing_peer_said_counts_in_a_succession(stage: Stage | None, before: bool) -> None:
    """A member that has the result loses its leader. What the only other voter said when it left decides: it
    was DONE, or had it committed, and so is the round; or it denied it, and it is void. One that
    says nothing of it counts as dead.
    """
    receiver = member()
    held = Held(BALLOT, stage, True, DIGESTS, (ME, LEADER, OTHER), WEIGHTS, SAMPLES) if stage else None
    leaves = Received(OTHER, Departing(0, (held,) if held is not None else ()))
    dies = PeerDown(LEADER, "gone")
    for at, event in enumerate((leaves, dies) if before else (dies, leaves)):
        receiver.handle(event, 0.6 + 0.1 * at)
    held_now = receiver.core.holding
    assert held_now is None or held_now.ballot != BALLOT
    assert receiver.epoch == (0 if stage in (Stage.OPEN, Stage.ABORTED) else 1)


def test_whoever_links_to_a_departing_peer_hears_that_it_leaves() -> None:
    """A link that comes up while a handover is on its way brings the last words as well."""
    departing = member()
    departing.handle(Received(LEADER, VOID), 0.6)
    departing.handle(Leave(5.0, hand_over=True), 0.7)
    actions = departing.handle(PeerUp(b"z" * 20, 0, LINEAGE), 0.8)
    assert [held.stage for held in words(actions)] == [Stage.ABORTED]
