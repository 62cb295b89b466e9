"""The pure decisions of the rounds: who leads, how long to wait, whom to blame, what to commit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.events import PeerUp, RankProgress
from p2pavg.rounds.machine.rules.camps import Camp, LinkedPeers
from p2pavg.rounds.machine.rules.deadlines import SILENCE_FLOOR, SILENCE_PRIOR, Deadlines, K, Measured
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.machine.rules.stalls import NOTHING, TransferWatch, judge
from p2pavg.rounds.machine.succession import decide
from p2pavg.rounds.protocol.ballot import Ballot, Held, Stage
from p2pavg.rounds.protocol.lineage import History, first_lineage, next_lineage
from p2pavg.rounds.protocol.messages import Progress
from p2pavg.rounds.protocol.roles import Generation, Role

A, B, C, D = (bytes([n]) * 20 for n in range(1, 5))
L0, L1, L2 = (bytes([n]) * 32 for n in range(1, 4))


def test_a_missing_peer_changes_the_leader_only_if_it_led() -> None:
    """Rendezvous hashing: two views that differ in one peer name the same leader unless it is that peer."""
    peers = [random.Random(n).randbytes(20) for n in range(12)]
    for epoch in range(50):
        leader = rendezvous(b"run", epoch, tuple(peers))
        for gone in peers:
            rest = [peer for peer in peers if peer != gone]
            assert (rendezvous(b"run", epoch, tuple(rest)) == leader) == (gone != leader)


def test_leadership_is_spread_over_the_peers() -> None:
    """Over many epochs every peer is named, so that no machine carries all the work."""
    assert {rendezvous(b"run", epoch, (A, B, C, D)) for epoch in range(100)} == {A, B, C, D}
    assert rendezvous(b"run", 0, ()) is None


def test_a_limit_is_the_prior_until_something_is_measured() -> None:
    """Before three measurements the prior holds; then median + k * MAD, never below the floor."""
    measured = Measured()
    assert measured.limit(2.0, 0.5) == 2.0
    for value in (0.1, 0.1, 0.1):
        measured.add(value)
    assert measured.limit(2.0, 0.5) == 0.5
    for value in (3.0, 4.0, 5.0, 3.0, 4.0, 5.0):
        measured.add(value)
    assert measured.limit(2.0, 0.5) == pytest.approx(3.0 + K * 2.0)


def test_a_silent_peer_is_given_up_within_the_bars() -> None:
    """Silence costs at most 1.1 s on loopback, 1.3 s at 0.1 s RTT, less once heartbeats are regular."""
    deadlines = Deadlines()
    deadlines.measured_rtt(A, 0.0002)
    deadlines.measured_rtt(B, 0.1)
    assert deadlines.silence(A) <= SILENCE_PRIOR + 0.1
    assert deadlines.silence(B) <= SILENCE_PRIOR + 0.3
    for _ in range(10):
        deadlines.measured_gap(A, 0.1)
    assert deadlines.silence(A) < SILENCE_FLOOR + 0.01


def test_a_path_that_slows_down_gets_little_more_patience() -> None:
    """Round trips grow to seconds with the queue of a slow path: whoever is behind it is waited for as on the
    path before, and a little longer; on another path of the same peer they count anew.
    """
    deadlines = Deadlines()
    deadlines.measured_rtt(A, 0.1)
    before = deadlines.silence(A), deadlines.word(A), deadlines.answer(A)
    for rtt in (0.2, 1.0, 4.0, 9.0):
        deadlines.measured_rtt(A, rtt)
    assert 0.1 < deadlines.rtt(A) <= 0.5
    after = deadlines.silence(A), deadlines.word(A), deadlines.answer(A)
    assert all(0.0 < now - then < 2.0 for then, now in zip(before, after, strict=True))
    deadlines.forget(A)
    deadlines.measured_rtt(A, 0.6)
    assert deadlines.rtt(A) == 0.6


def test_irregular_heartbeats_make_the_limit_longer() -> None:
    """A peer whose heartbeats come in bursts is given more time than a regular one."""
    deadlines = Deadlines()
    for gap in (0.1, 0.9, 0.2, 1.1, 0.1, 0.8, 0.4):
        deadlines.measured_gap(A, gap)
        deadlines.measured_gap(B, 0.1)
    assert deadlines.silence(A) > 1.5 > deadlines.silence(B)


def chunks(received: int, expected: int = 10, moved: int = 0) -> RankProgress:
    return RankProgress(received, 0, expected, 0, moved)


def test_a_rank_without_progress_lags_and_a_moving_one_does_not() -> None:
    """Only who owes something and has not moved within its deadline lags; a chunk at times is enough."""
    watch = TransferWatch(0.0, [A, B, C], A, Deadlines())
    for tick in range(1, 60):
        now = tick * 0.2
        watch.update(now, [chunks(0, 0), chunks(min(10, tick // 5)), chunks(3)])
    assert watch.lagging(now) == ((2,), ())


def test_one_link_may_stand_for_seconds_while_others_move() -> None:
    """However regular its chunks were: a busy machine serves it late, or its path lost them. Nobody could
    finish without the others anyway. Once nothing else is on its way, the usual deadline counts.
    """
    watch, now = TransferWatch(0.0, [A, B, C], A, Deadlines()), 0.0
    for tick in range(1, 28):  # 1 s in which both come, and 1.7 in which one does
        now = tick * 0.1
        watch.update(now, [chunks(0, 0), chunks(tick, 99), chunks(min(tick, 10), 99)])
    assert watch.lagging(now) == ((), ())
    watch.update(now, [chunks(0, 0), chunks(99, 99), chunks(10, 99)])
    assert watch.lagging(now) == ((2,), ())
    for tick in range(28, 45):
        now = tick * 0.1
        watch.update(now, [chunks(0, 0), chunks(tick, 99), chunks(10, 99)])
    assert watch.lagging(now) == ((2,), ())


def test_slow_bytes_count_as_movement_and_a_trickle_does_not() -> None:
    """Within a chunk, 100 kB/s keep a rank in the group; 1 kB/s is a stall."""
    watch = TransferWatch(0.0, [A, B, C], A, Deadlines())
    for tick in range(1, 60):
        now = tick * 0.2
        watch.update(now, [chunks(0, 0), chunks(0, moved=tick * 20_000), chunks(0, moved=tick * 200)])
    assert watch.lagging(now) == ((2,), ())


def test_missing_results_do_not_lag_while_contributions_are_missing() -> None:
    """An owner that owes both is named for its contributions; results alone are named as results."""
    watch = TransferWatch(0.0, [A, B, C], A, Deadlines())
    watch.update(9.0, [chunks(0, 0), RankProgress(0, 0, 4, 4), RankProgress(4, 0, 4, 4)])
    watch.update(20.0, [chunks(0, 0), RankProgress(0, 0, 4, 4), RankProgress(4, 0, 4, 4)])
    assert watch.lagging(20.0) == ((1,), (2,))


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ({0: ((2,), ()), 1: ((2,), ())}, 2),  # everybody lacks rank 2
        ({1: ((0, 2, 3), ())}, 1),  # one that hears nobody is broken itself
        ({1: ((2,), ()), 2: ((1,), ())}, 2),  # their link is cut: one of them
        ({1: ((0,), ())}, 1),  # the leader does not name itself
        ({1: ((2,), (0, 3)), 3: ((), (2,))}, 2),  # results are not looked at while contributions are missing
        ({1: ((), (2,)), 3: ((), (2,))}, 2),
        ({}, None),
    ],
)
def test_the_verdict_on_a_stall(
    reports: dict[int, tuple[tuple[int, ...], tuple[int, ...]]], verdict: int | None
) -> None:
    """The rank at most edges of the graph of missing data is left out."""
    assert judge(reports, leader=0) == verdict


MEMBERS, PARTIAL, ABOVE = range(NOTHING)  # what a rank still lacks


def excuse(lacking: dict[int, int]) -> Callable[[int, int], bool]:
    """Ranks that lack something, by what, are excused of what they make of it."""
    return lambda rank, stage: lacking.get(rank, NOTHING) < stage


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ({0: ((3,), ()), 3: ((0,), ())}, 3),  # the two that swap lack each other's partial mean
        (
            {2: ((), (3,)), 0: ((3,), ()), 3: ((2,), ())},
            2,
        ),  # 3 has none to send, for want of 2's contribution
        ({1: ((), (0,)), 2: ((), (3,)), 3: ((0,), ()), 0: ((1,), ())}, 1),
        ({2: ((), (3,))}, 3),  # 3 has made the result, and does not give it to 2
    ],
)
def test_the_verdict_on_two_that_swap(
    reports: dict[int, tuple[tuple[int, ...], tuple[int, ...]]], verdict: int
) -> None:
    """Members 0 and 1, and 2 and 3, are regions; 0 and 3 swap. What lacks inside a region counts first."""
    plan = Plan((Part(0, 0, 9, (3,), swaps=True),), (1, 1, 2, 2))
    assert judge(reports, leader=4, plan=plan) == verdict


@pytest.mark.parametrize("swaps", [True, False])
def test_of_two_that_wait_for_each_others_means_one_is_at_fault(swaps: bool) -> None:
    """Both wait for data that others need, and neither gets any: that would be an excuse for ever."""
    there, back = Part(0, 0, 9, (3,), swaps=swaps), Part(3, 9, 9, (0,), swaps=swaps)
    plan = Plan((there, back), (1, 1, 2, 2))
    reports = {0: ((3,), ()), 3: ((0,), ())}
    assert judge(reports, leader=4, excused=excuse({0: PARTIAL, 3: PARTIAL}), plan=plan) in (0, 3)
    assert judge(reports, leader=4, excused=excuse({0: PARTIAL, 3: MEMBERS}), plan=plan) == 0
    assert judge({0: ((3,), ())}, leader=4, excused=excuse({3: MEMBERS}), plan=plan) is None


def test_a_deputy_that_still_adds_up_owes_no_mean() -> None:
    """Its members' contributions come slowly, as on a busy machine, and it waits for means of others itself:
    that others wait for its means is nobody's fault. Once it has all that its own means take, it is at fault.
    """
    parts = tuple(Part(owner, owner, 1, ((owner + 2) % 4,)) for owner in range(4))
    plan = Plan(parts, (0, 0, 1, 1))
    reports = {1: ((3,), ()), 3: ((1,), ()), 0: ((2,), (1,)), 2: ((0,), ())}
    adding = dict.fromkeys(range(4), MEMBERS)
    assert judge(reports, leader=4, excused=excuse(adding), plan=plan) is None
    assert judge(reports, leader=4, excused=excuse({**adding, 3: PARTIAL}), plan=plan) == 3


def test_an_owner_is_excused_while_contributions_to_it_still_come() -> None:
    """Whoever waits for results of a part whose last contribution is slow names nobody; a lack that is
    somebody's fault is seen beside it.
    """
    waiting = {1: ((), (2,)), 3: ((), (2,))}
    adding = excuse({2: MEMBERS})
    assert judge(waiting, leader=0, excused=adding) is None
    assert judge({**waiting, 2: ((3,), ())}, leader=0, excused=adding) == 3
    assert judge({1: ((), (2, 3))}, leader=0, excused=adding) == 3


def test_a_peer_knows_that_contributions_to_its_parts_still_come() -> None:
    """From the first progress to the last contribution it cannot be blamed for missing results; nor for means
    while members' contributions come, nor for what it passes on before it has that.
    """
    watch = TransferWatch(0.0, [A, B, C], A, Deadlines(), partial={2}, above={2})
    assert watch.lacks == NOTHING
    watch.update(0.1, [chunks(0, 0), chunks(9), RankProgress(9, 0, 10, 5)])
    assert watch.lacks == MEMBERS
    watch.update(0.2, [chunks(0, 0), chunks(10), RankProgress(9, 0, 10, 5)])
    assert watch.lacks == PARTIAL
    watch.update(0.3, [chunks(0, 0), chunks(10), RankProgress(10, 4, 10, 5)])
    assert watch.lacks == ABOVE
    watch.update(0.4, [chunks(0, 0), chunks(10), RankProgress(10, 5, 10, 5)])
    assert watch.lacks == NOTHING


def held(
    stage: Stage, attempt: int = 0, digest: bytes = b"x" * 32, voters: tuple[bytes, ...] = (A, B, C)
) -> Held:
    return Held(Ballot(3, attempt, A, attempt, L0), stage, True, (digest,), voters)


@pytest.mark.parametrize(
    ("answers", "commits"),
    [
        ({B: held(Stage.DONE), C: held(Stage.DONE)}, True),
        ({B: held(Stage.DONE), C: held(Stage.OPEN)}, False),
        ({B: held(Stage.DONE), C: None}, False),
        ({B: held(Stage.DONE), C: held(Stage.DONE, digest=b"y" * 32)}, False),
        ({B: held(Stage.DONE), C: held(Stage.OPEN, attempt=1)}, False),
        ({B: held(Stage.DONE, voters=(A, B)), C: None}, True),  # it had no vote in that ballot
        ({B: held(Stage.OPEN), C: held(Stage.COMMITTED)}, True),
        ({B: held(Stage.DONE)}, True),  # a lone survivor
        ({B: held(Stage.OPEN)}, False),
        ({B: None}, False),
        ({}, False),
    ],
)
def test_what_a_successor_decides(answers: dict[bytes, Held | None], commits: bool) -> None:
    """Commit when somebody did, or when all voters that answered are DONE with equal digests; else abort."""
    assert (decide(answers) is not None) == commits


def test_a_lineage_names_everything_that_went_into_it() -> None:
    """Another past, epoch, member, weight, result or note is another lineage."""
    base = (L0, 1, [A, B], [1.0, 2.0], [b"x" * 32], b"n")
    other = [
        (L1, 1, [A, B], [1.0, 2.0], [b"x" * 32], b"n"),
        (L0, 2, [A, B], [1.0, 2.0], [b"x" * 32], b"n"),
        (L0, 1, [A, C], [1.0, 2.0], [b"x" * 32], b"n"),
        (L0, 1, [A, B], [1.0, 2.5], [b"x" * 32], b"n"),
        (L0, 1, [A, B], [1.0, 2.0], [b"y" * 32], b"n"),
        (L0, 1, [A, B], [1.0, 2.0], [b"x" * 32, b"x" * 32], b"n"),
        (L0, 1, [A, B], [1.0, 2.0], [b"x" * 32], b""),
    ]
    assert next_lineage(*base) == next_lineage(*base)
    assert len({next_lineage(*arguments) for arguments in [base, *other]}) == 8
    assert first_lineage(b"r", L0) != first_lineage(b"s", L0) != first_lineage(b"s", L1)


def generation(epoch: int, lineage: bytes, transfer: int) -> Generation:
    return Generation(epoch, lineage, transfer, 10, 10 * (epoch + 1), A)


def test_what_healing_loses_is_named_exactly() -> None:
    """Samples in averages of the lost branch, and unaveraged ones, are lost; those in the donor's are not."""
    history = History()
    for epoch, transfer in ((0, 100), (1, 101)):
        history.offer(epoch, transfer, 5)
    history.append(generation(0, L0, 100))
    history.append(generation(1, L1, 101))
    history.offer(2, 102, 4)
    donor = [generation(0, L0, 100), generation(1, L2, 201), generation(2, L2, 102)]
    assert history.adopt(donor, unaveraged=7) == 7 - 4 + 5
    assert [g.transfer for g in history.generations] == [100, 201, 102]


def test_going_back_to_the_first_branch_takes_the_loss_back() -> None:
    """Lost to one branch and won back with the other: the net is what is in no average."""
    history = History()
    history.offer(0, 100, 5)
    first, second = [generation(0, L0, 100)], [generation(0, L1, 200)]
    history.append(first[0])
    assert history.adopt(second, unaveraged=0) == 5
    assert history.adopt(first, unaveraged=0) == -5


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (Camp(4, L1, 1, 5), Camp(3, L0, 9, 99)),
        (Camp(3, L1, 3, 5), Camp(3, L0, 2, 99)),
        (Camp(3, L1, 2, 9), Camp(3, L0, 2, 5)),
        (Camp(3, L0, 2, 5), Camp(3, L1, 2, 5)),
    ],
)
def test_which_camp_wins(winner: Camp, loser: Camp) -> None:
    """The higher epoch, then more peers, then more samples, then the smaller id; never both."""
    assert winner.beats(loser)
    assert not loser.beats(winner)


def test_a_doubted_peer_counts_with_others_alone() -> None:
    """What it says of being ahead is nothing, unless somebody else stands there, too."""
    view = LinkedPeers()
    for name in (b"a", b"b"):
        view.up(PeerUp(name * 20, 9, L0, Role.TRAINER))
    assert view.rivals(5, L0)
    view.doubt({b"a" * 20})
    assert [camp.epoch for camp in view.camps(Camp(5, L0, 1, 0))] == [5, 9]
    view.down(b"b" * 20)
    assert not view.rivals(5, L0)
    assert [camp.epoch for camp in view.camps(Camp(5, L0, 1, 0))] == [5]
    view.doubt(())
    assert view.rivals(5, L0)


def test_the_view_counts_camps_without_silent_and_joining_peers() -> None:
    """A camp is made of trainers that are heard and have their state."""
    view = LinkedPeers()
    for peer in (A, B, C):
        view.up(PeerUp(peer, 5, L1))
    silent = view.get(C)
    assert silent is not None
    view.hears(silent, silent=True)
    mine, other = view.camps(Camp(5, L0, 1, 0))
    assert (mine.peers, other.peers) == (1, 2)


def test_a_view_finds_everybody_who_stands_somewhere() -> None:
    """Whatever peers tell, and whoever falls silent or leaves: a camp holds just the live trainers there."""
    dice, view, peers = random.Random(3), LinkedPeers(), [bytes([n]) * 20 for n in range(6)]
    roles = (Role.TRAINER, Role.TRAINER, Role.JOINER, Role.WATCHER)
    for _ in range(2000):
        peer, epoch, lineage = dice.choice(peers), dice.randrange(3), dice.choice((L0, L1))
        facts = view.get(peer)
        if facts is None or dice.random() < 0.1:
            view.up(PeerUp(peer, epoch, lineage, dice.choice(roles)))
        elif dice.random() < 0.2:
            view.hears(facts, silent=dice.random() < 0.5)
        elif dice.random() < 0.2:
            view.stands(facts, epoch, lineage, joining=dice.random() < 0.3)
        elif dice.random() < 0.2:
            view.down(peer)
        else:
            view.told(peer, progress(epoch, lineage, joining=dice.random() < 0.3), 0.0)
        for at in range(3):
            for line in (L0, L1):
                there = [f for f in view if f.trains_at(at, line)]
                assert sorted(f.peer for f in view.standing(at, line)) == sorted(f.peer for f in there)
        ahead = any(f.trains_at(f.epoch, f.lineage) and (f.epoch, f.lineage) > (1, L0) for f in view)
        assert view.rivals(1, L0) == ahead


def progress(epoch: int, lineage: bytes, *, joining: bool) -> Progress:
    return Progress(epoch, lineage, 1, 1.0, False, False, joining, 1, 1, 0.1, 1, None, 0.0, 0.0, (), ())
