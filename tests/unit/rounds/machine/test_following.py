"""A peer that catches up stands where its parameters are, whatever becomes of the download."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, OpenJob, Send, StartHeal, StopHeal
from p2pavg.rounds.machine.events import (
    Donors,
    Event,
    Followed,
    Healed,
    HealFailed,
    Health,
    LocalProgress,
    PeerDown,
    PeerHealth,
    PeerUp,
    Received,
    Tick,
)
from p2pavg.rounds.machine.healing import DOUBT_S, FIRST_ASKED
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.protocol.ballot import Ballot, Stage
from p2pavg.rounds.protocol.messages import (
    Departing,
    Follow,
    Inquire,
    Prepare,
    Progress,
    Promise,
    Query,
    Refuse,
    Totals,
    Unknown,
)
from p2pavg.rounds.protocol.roles import Role, Seat

ME, DONOR, OTHER, LOST = (name * 20 for name in (b"a", b"b", b"c", b"d"))
HERE, AHEAD, OTHERS = b"l" * 32, b"m" * 32, b"o" * 32


def alone(role: Role = Role.TRAINER) -> Machine:
    """A peer that knows nobody yet."""
    config = Config(
        me=ME,
        run_id="r",
        epoch=0,
        lineage=HERE,
        target=4,
        plan=lambda members: Plan((Part(0, 0, 5),)),
        role=role,
    )
    return Machine(config, 0.0)


def hears(machine: Machine, since: float, until: float, *heard: PeerHealth) -> list[Action]:
    """Time passes, and at its end the links are looked at."""
    actions: list[Action] = []
    for tenth in range(round(10 * since) + 1, round(10 * until) + 1):
        actions += machine.handle(Tick(), tenth / 10)
    return actions + machine.handle(Health(heard), until)


def test_a_result_that_is_applied_after_the_download_was_given_up_counts() -> None:
    """The last donor goes while results wait for the training thread, and the peer trains on alone. What it
    applies then is in its parameters: it averages from there, and not from where it was.
    """
    machine = alone()
    actions = machine.handle(PeerUp(DONOR, 1, AHEAD, leader=DONOR), 0.1)
    assert [action.results_do for action in actions if isinstance(action, StartHeal)] == [True]
    machine.handle(PeerDown(DONOR, "gone"), 0.2)
    machine.handle(HealFailed("no donor is left"), 0.2)
    now = 0.2
    while machine.core.here.joining is not None:
        now += 0.1
        assert now < 10.0
        machine.handle(Tick(), now)
    machine.handle(Followed(0, HERE, AHEAD, 77, 8, DONOR), now + 0.1)
    assert (machine.epoch, machine.lineage, machine.total_samples) == (1, AHEAD, 8)
    actions = machine.handle(LocalProgress(4, 1.0, at_boundary=True), now + 0.2)
    assert [a.ballot.standing for a in actions if isinstance(a, OpenJob)] == [(1, AHEAD)]


def test_whoever_downloads_from_silent_donors_turns_to_others_that_are_heard() -> None:
    """A donor behind a cut would be waited for until its link is given up; another camp lives."""
    machine = alone()
    machine.handle(PeerUp(DONOR, 2, AHEAD, leader=DONOR), 0.1)
    actions = machine.handle(PeerUp(OTHER, 1, b"n" * 32, leader=OTHER), 0.2)
    assert machine.core.here.joining == (2, AHEAD)
    assert not any(isinstance(action, StartHeal) for action in actions)
    heard = PeerHealth(OTHER, 0.0, 0.0, 0.0, 0.1), PeerHealth(DONOR, 5.9, 5.9, 5.9, 0.1)
    actions = hears(machine, 0.2, 6.0, *heard)
    assert [action.donors for action in actions if isinstance(action, StartHeal)] == [(OTHER,)]
    assert machine.core.here.joining == (1, b"n" * 32)


def test_a_donor_that_gives_nothing_does_not_make_up_for_one_that_fell_silent() -> None:
    """Of two that were asked one gives the state, and is cut off: the other one lives, and is asked anew."""
    machine = alone()
    actions = machine.handle(PeerUp(OTHER, 2, AHEAD, leader=OTHER), 0.1)
    assert [action.donors for action in actions if isinstance(action, StartHeal)] == [(OTHER,)]
    machine.handle(PeerUp(DONOR, 2, AHEAD, leader=OTHER), 0.2)
    machine.handle(Donors((DONOR,)), 0.3)  # it came meanwhile, and answered first
    heard = PeerHealth(OTHER, 0.0, 0.0, 0.0, 0.1), PeerHealth(DONOR, 5.7, 5.7, 5.7, 0.1)
    actions = hears(machine, 0.3, 6.0, *heard)
    assert [action.donors for action in actions if isinstance(action, StartHeal)] == [(OTHER,)]


@pytest.mark.parametrize("role", [Role.TRAINER, Role.JOINER])
def test_whoever_has_a_state_waits_for_no_silent_donor(role: Role) -> None:
    """There is nobody to turn to. A peer with a state goes on with that at once, as others do that are cut
    off; a newcomer, which has none, keeps what is here already. Once the donor is heard again, it is asked
    again.
    """
    machine = alone(role)
    machine.handle(PeerUp(DONOR, 2, AHEAD, leader=DONOR), 0.1)
    assert machine.core.here.joining == (2, AHEAD)
    actions = hears(machine, 0.1, 6.0, PeerHealth(DONOR, 5.9, 5.9, 5.9, 0.1))
    assert not any(isinstance(action, StartHeal) for action in actions)
    assert any(isinstance(action, StopHeal) for action in actions) == (role is Role.TRAINER)
    assert machine.core.here.joining == (None if role is Role.TRAINER else (2, AHEAD))
    actions = hears(machine, 6.0, 7.0, PeerHealth(DONOR, 0.0, 0.0, 0.0, 0.1))
    assert any(isinstance(action, StartHeal) for action in actions) == (role is Role.TRAINER)
    assert machine.core.here.joining == (2, AHEAD)


@pytest.mark.parametrize("end", [PeerDown(DONOR, "gone"), Health((PeerHealth(DONOR, 9.0, 9.0, 9.0, 0.1),))])
@pytest.mark.parametrize("role", [Role.TRAINER, Role.JOINER])
def test_who_leaves_is_waited_for_while_it_may_give_its_results(role: Role, end: Event) -> None:
    """The last peer that has a state or result says that it leaves, and goes on giving it: whoever went on
    without would drop an average that others were told of. It is waited for until nothing is heard of it.
    """
    machine = alone(role)
    machine.handle(PeerUp(DONOR, 2, AHEAD, leader=DONOR), 0.1)
    machine.handle(Received(DONOR, Departing(2, ())), 0.2)
    if role is Role.JOINER:
        machine.handle(Healed(1, OTHERS, ()), 0.3)
    given = hears(machine, 0.3, 6.0, PeerHealth(DONOR, 0.0, 0.0, 0.0, 0.1))
    assert not any(isinstance(action, StopHeal) for action in given)
    assert machine.core.here.joining is not None
    over = [*hears(machine, 6.0, 10.0), *machine.handle(end, 10.0)]
    assert any(isinstance(action, StopHeal) for action in over)
    assert machine.core.here.joining is None


@pytest.mark.parametrize("leader", ["lives", "is gone", "is suspected"])
def test_a_ballot_that_is_done_waits_for_a_leader_that_is_heard(leader: str) -> None:
    """Somebody outside of the round is an epoch ahead, and knows nothing of the ballot: its leader may have
    committed it all the same. Without that leader, or once others decide in its place, nobody waits for it.
    """
    machine = alone()
    machine.handle(PeerUp(DONOR, 0, HERE, leader=DONOR), 0.1)
    ballot = Ballot(0, 0, DONOR, 1, HERE)
    seats = Seat(ME, True), Seat(DONOR, True)
    machine.core.promises.add(ballot)
    machine.core.hold(Holding(ballot, seats, 0, Plan((Part(0, 0, 5),)), 0.1, Stage.DONE, begun=True))
    machine.handle(PeerUp(OTHER, 1, AHEAD, leader=OTHER), 0.2)
    if leader == "is gone":
        machine.core.linked.down(DONOR)
    if leader == "is suspected":
        machine.core.suspect(DONOR)
    machine.healing.on_unknown(OTHER, Unknown(ballot, 1, AHEAD))
    machine.healing.on_ask_timer()
    assert (machine.core.holding is not None) == (leader == "lives")
    assert (machine.core.here.joining is None) == (leader == "lives")


def test_some_of_those_ahead_are_asked_about_a_ballot_and_the_others_if_they_are_mute() -> None:
    """First its members. Nobody is asked twice; when nobody knows, this peer goes to the others' state."""
    machine, ahead = alone(), [bytes([1 + number]) * 20 for number in range(40)]
    machine.handle(PeerUp(DONOR, 0, HERE, leader=DONOR), 0.1)
    ballot = Ballot(0, 0, DONOR, 1, HERE)
    seats = tuple(Seat(peer, True) for peer in (ME, DONOR, ahead[-1]))
    machine.core.promises.add(ballot)
    machine.core.hold(Holding(ballot, seats, 0, Plan((Part(0, 0, 5),)), 0.1, Stage.OPEN, begun=True))
    asked: list[bytes] = []

    def tick(now: float) -> None:
        sends = [action for action in machine.handle(Tick(), now) if isinstance(action, Send)]
        asked.extend(s.peer for s in sends if isinstance(s.message, Inquire) and s.peer in ahead)

    for peer in ahead:
        machine.core.linked.up(PeerUp(peer, 1, AHEAD))
    tick(0.2)
    assert asked[0] == ahead[-1]
    assert len(asked) == FIRST_ASKED
    for tenth in range(3, 30):
        tick(tenth / 10)
        if len(asked) > FIRST_ASKED:
            break
    assert sorted(asked) == sorted(ahead)
    assert machine.core.holding is not None
    machine.handle(Received(ahead[0], Unknown(ballot, 1, AHEAD)), machine.core.now + 0.01)
    assert machine.core.holding is None
    assert machine.core.here.joining == (1, AHEAD)


@pytest.mark.parametrize("word", ["totals", "proposal"])
def test_a_leader_is_followed_though_its_hello_named_a_joiner(word: str) -> None:
    """The newcomer became a trainer between its hello and the link, and the word that told so went astray.
    As the leader it tells nobody where it stands: what it does as the leader has to be enough.
    """
    machine = alone()
    machine.handle(PeerUp(DONOR, 0, HERE, Role.JOINER), 0.1)
    machine.handle(PeerUp(OTHER, 0, HERE), 0.1)
    machine.handle(Received(OTHER, Follow(0, HERE, DONOR)), 0.2)
    assert machine.leader != DONOR
    ballot, members = Ballot(0, 0, DONOR, 1, HERE), (ME, DONOR, OTHER)
    proposal = Prepare(ballot, members, (True, True, True), Plan((Part(0, 0, 5),)))
    machine.handle(Received(DONOR, Totals(0, HERE, 1) if word == "totals" else proposal), 0.3)
    machine.handle(Received(OTHER, Follow(0, HERE, DONOR)), 0.4)
    assert machine.leader == DONOR


def test_what_a_peer_told_over_its_link_counts_more_than_that_it_led() -> None:
    """A leader that began a download is none any more, whatever word of it is still under way."""
    machine = alone()
    machine.handle(PeerUp(DONOR, 0, HERE), 0.1)
    machine.handle(Received(DONOR, replace(machine.core.progress(), joining=True)), 0.2)
    machine.handle(Received(DONOR, Totals(0, HERE, 1)), 0.3)
    assert not list(machine.core.linked.trainers())


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_a_minority_that_is_ahead_and_gives_nothing_is_left_for_a_while(liars: int) -> None:
    """Two of four others that say that they are epochs ahead keep nobody from the rest; three of four do."""
    machine = alone()
    for number in range(4):
        ahead = number < liars
        peer = PeerUp(bytes([98 + number]) * 20, 9 if ahead else 0, AHEAD if ahead else HERE)
        machine.handle(peer, 0.1)
    assert machine.core.here.joining == (9, AHEAD)
    machine.handle(HealFailed("nobody gives anything"), 0.2)
    downloads = []
    for tenth in range(3, 50):
        actions = machine.handle(Tick(), tenth / 10)
        if any(isinstance(action, StartHeal) for action in actions):
            downloads.append(tenth)
            machine.handle(HealFailed("nobody gives anything"), tenth / 10)
    assert len(downloads) == (0 if liars < 3 else 9)
    assert (machine.core.here.joining is None) is (liars < 3)


def test_whoever_gives_nothing_again_and_again_is_left_for_longer_each_time() -> None:
    """One that says that it is epochs ahead is tried again after 8 s, 16 s, 32 s: it may have results."""
    machine = alone()
    for number in range(3):
        epoch, lineage = (0, HERE) if number else (9, AHEAD)
        machine.handle(PeerUp(bytes([98 + number]) * 20, epoch, lineage), 0.1)
    assert machine.core.here.joining == (9, AHEAD)
    machine.handle(HealFailed("nobody gives anything"), 0.2)
    tried = [0.2]
    for tenth in range(3, 600):
        actions = machine.handle(Tick(), tenth / 10)
        if any(isinstance(action, StartHeal) for action in actions):
            tried.append(tenth / 10)
            machine.handle(HealFailed("nobody gives anything"), tenth / 10)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses == pytest.approx([DOUBT_S, 2 * DOUBT_S, 4 * DOUBT_S], abs=1.0)


@pytest.mark.parametrize("asks", ["question", "proposal"])
def test_who_waits_for_a_successor_answers_it_though_the_leader_is_heard_again(asks: str) -> None:
    """A leader behind a slow link is heard for a moment now and then. Members that have its result turned to
    one successor: to refuse it as busy would have it ask again, seconds later, and another one be busy then.
    """
    machine = alone()
    machine.handle(PeerUp(DONOR, 0, HERE, leader=DONOR), 0.1)
    machine.handle(PeerUp(OTHER, 0, HERE, leader=DONOR), 0.1)
    ballot, plan = Ballot(0, 0, DONOR, 1, HERE), Plan((Part(0, 0, 5),))
    seats = tuple(Seat(peer, True) for peer in (ME, DONOR, OTHER))
    machine.core.promises.add(ballot)
    machine.core.follow(DONOR)
    machine.core.hold(Holding(ballot, seats, 0, plan, 0.1, Stage.DONE, begun=True))
    quiet = PeerHealth(DONOR, 1.4, 1.4, 1.4, 0.1), PeerHealth(OTHER, 0.0, 0.0, 0.0, 0.1)
    hears(machine, 0.1, 1.5, *quiet)
    assert machine.succession.expected == OTHER
    hears(machine, 1.5, 1.6, *(PeerHealth(peer, 0.0, 0.0, 0.0, 0.1) for peer in (DONOR, OTHER)))
    assert machine.core.can_lead(DONOR)
    later = Ballot(0, 1, OTHER, 1, HERE)
    members, votes = tuple(seat.peer for seat in seats), (True, True, True)
    message = Query(later) if asks == "question" else Prepare(later, members, votes, plan)
    sent = [a.message for a in machine.handle(Received(OTHER, message), 1.7) if isinstance(a, Send)]
    answers = [each for each in sent if isinstance(each, (Promise, Refuse)) and each.ballot == later]
    assert [type(answer) for answer in answers] == [Promise]


def test_one_member_of_another_lineage_that_gives_nothing_is_left_for_longer_each_time() -> None:
    """It says that it stands in the same epoch, among a million peers: nobody else does."""
    machine, liar = alone(), bytes([98]) * 20
    for number in range(4):
        machine.handle(PeerUp(bytes([98 + number]) * 20, 0, HERE), 0.1)
    told = replace(machine.core.progress(), lineage=AHEAD, camp=1 << 20, leader=liar)
    tried = []
    for tenth in range(2, 600):
        now = tenth / 10
        actions = [*machine.handle(Received(liar, told), now), *machine.handle(Tick(), now)]
        if any(isinstance(action, StartHeal) for action in actions):
            tried.append(now)
            machine.handle(HealFailed("nobody gives anything"), now)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    settles = 2.0  # before a rival of the same epoch is followed
    assert pauses == pytest.approx([DOUBT_S, 2 * DOUBT_S, 4 * DOUBT_S][: len(pauses)], abs=1.0 + settles)
    assert len(pauses) >= 2
    assert machine.core.here.joining is None


def test_a_newcomer_turns_from_a_minority_that_gives_nothing_to_the_others() -> None:
    """One of three says that it is epochs ahead: the state comes from the two others, after one try."""
    machine = alone(Role.JOINER)
    for number in range(3):
        epoch, lineage = (2, OTHERS) if number else (9, AHEAD)
        machine.handle(PeerUp(bytes([98 + number]) * 20, epoch, lineage), 0.1)
    assert machine.core.here.joining == (9, AHEAD)
    machine.handle(HealFailed("nobody gives anything"), 0.2)
    led_to = [
        (action.epoch, action.lineage)
        for tenth in range(3, 50)
        for action in machine.handle(Tick(), tenth / 10)
        if isinstance(action, StartHeal)
    ]
    assert led_to == [(2, OTHERS)]


@pytest.mark.parametrize("silent", [True, False])
def test_a_newcomer_asks_again_whom_it_doubts_when_nobody_else_has_a_state(silent: bool) -> None:
    """The other peer is silent, or is a newcomer, too: who gave nothing is asked again, by a deadline."""
    machine = alone(Role.JOINER)
    machine.handle(PeerUp(DONOR, 9, AHEAD), 0.1)
    machine.handle(PeerUp(OTHER, 0, HERE, role=Role.TRAINER if silent else Role.JOINER), 0.1)
    if silent:
        other = machine.core.linked.get(OTHER)
        assert other is not None
        machine.core.linked.hears(other, silent=True)
    machine.handle(HealFailed("nobody gives anything"), 0.2)
    tried = [
        (tenth / 10, action.epoch, action.lineage)
        for tenth in range(3, 120)
        if machine.next_deadline is not None
        for action in machine.handle(Tick(), tenth / 10)
        if isinstance(action, StartHeal)
    ]
    again = 0.7 if silent else 0.2 + DOUBT_S
    assert tried == [(pytest.approx(again, abs=0.11), 9, AHEAD)]


@pytest.mark.parametrize("hears_its_leader", [True, False])
def test_between_rounds_only_who_follows_nobody_answers_a_successor(hears_its_leader: bool) -> None:
    """A question that no lost leader has caused would bind this peer to a ballot of the asker's."""
    machine = alone()
    for peer in (DONOR, OTHER):
        machine.handle(PeerUp(peer, 0, HERE, leader=DONOR), 0.1)
    machine.core.follow(DONOR)
    if not hears_its_leader:
        machine.handle(PeerDown(DONOR, "gone"), 0.2)
    actions = machine.handle(Received(OTHER, Query(Ballot(0, 1, OTHER, 1, HERE))), 0.3)
    answers = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, (Promise, Refuse))]
    assert [type(answer) for answer in answers] == [Refuse if hears_its_leader else Promise]


def test_who_answered_a_successor_sends_its_own_followers_there() -> None:
    """A peer that holds a lost leader's ballot, and that another one follows, promises to a successor.
    Its follower hears it well, and would refuse the successor as busy, question after question.
    """
    machine = alone()
    machine.handle(PeerUp(DONOR, 0, HERE, leader=ME), 0.1)
    machine.handle(PeerUp(OTHER, 0, HERE, leader=OTHER), 0.1)
    machine.core.follow(ME)
    ballot, plan = Ballot(0, 0, LOST, 1, HERE), Plan((Part(0, 0, 5),))
    seats = tuple(Seat(peer, True) for peer in (ME, DONOR, OTHER, LOST))
    machine.core.promises.add(ballot)
    machine.core.hold(Holding(ballot, seats, 0, plan, 0.1, begun=True))
    asked = machine.handle(Received(OTHER, Query(Ballot(0, 1, OTHER, 1, HERE))), 0.2)
    assert any(isinstance(a, Send) and isinstance(a.message, Promise) for a in asked)
    report = replace(machine.core.progress(), leader=ME, samples=1)
    actions = machine.handle(Received(DONOR, report), 0.3)
    sent = [action for action in actions if isinstance(action, Send)]
    told = [(a.peer, a.message.leader) for a in sent if isinstance(a.message, Follow)]
    assert told == [(DONOR, OTHER)]


def test_who_refuses_a_successor_reports_to_its_leader() -> None:
    """Its leader may have promised to that successor, and says so in its answer."""
    machine = alone()
    for peer in (DONOR, OTHER):
        machine.handle(PeerUp(peer, 0, HERE, leader=DONOR), 0.1)
    machine.core.follow(DONOR)
    machine.handle(Tick(), 0.2)
    actions = machine.handle(Received(OTHER, Query(Ballot(0, 1, OTHER, 1, HERE))), 2.0)
    sent = [(a.peer, type(a.message)) for a in actions if isinstance(a, Send)]
    assert sent == [(OTHER, Refuse), (DONOR, Progress)]
