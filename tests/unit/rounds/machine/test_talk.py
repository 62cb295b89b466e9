"""How much peers say: nobody answers an answer for ever, and no kind of message grows as a square."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, BeginJob, Send
from p2pavg.rounds.machine.events import (
    Applied,
    Event,
    JobDone,
    Leave,
    LocalProgress,
    PeerUp,
    RankProgress,
    Received,
)
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.machine.memory.holding import Holding
from p2pavg.rounds.machine.memory.proposal import Proposal
from p2pavg.rounds.machine.rules.deadlines import LEAST_RATE, Timer
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.ballot import Ballot, PeerId
from p2pavg.rounds.protocol.causes import Cause
from p2pavg.rounds.protocol.messages import Begun, Committed, Done, Follow, Message, Prepare, Ready, Stalled
from p2pavg.rounds.protocol.roles import Seat
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

ONE, TWO = (name * 20 for name in (b"a", b"b"))
FEW, MANY = 8, 32
LARGE = 40
MOST_ASKED = 8  # ballots of an epoch in which half of the members are lost: each alone would cost one
SPARE = 6  # messages of one kind that a member of the larger group may send beyond twice those of the smaller
LINEAGE = b"l" * 32


class Pair:
    """Two machines; all that they say arrives at once, twice if `twice`. The clock moves only by hand."""

    def __init__(self, *, twice: bool = False, lockstep: bool = False) -> None:
        self.machines = {
            me: Machine(
                Config(
                    me=me,
                    run_id="r",
                    epoch=0,
                    lineage=LINEAGE,
                    target=12,
                    lockstep=lockstep,
                    plan=lambda members: Plan((Part(0, 0, 5),)),
                ),
                0.0,
            )
            for me in (ONE, TWO)
        }
        self.ranks: tuple[RankProgress, ...] = ()  # how far a job is when it is done
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
                if isinstance(action, BeginJob):
                    self._queue.append((to, JobDone(action.transfer, (b"d" * 32,), self.ranks)))
                elif isinstance(action, Send):
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


def befalls(calm: Calm, fault: str) -> None:
    """Disturb the round that is under way."""
    leader, swarm = calm.leader, calm.swarm
    other = next(node for node in calm.nodes if node is not leader)
    if fault == "the leader dies in the transfer":
        leader.die("crash")
    elif fault == "the leader stops in the transfer":
        leader.stop()
    elif fault == "a member dies in the transfer":
        other.die("crash")
    elif fault == "the leader dies as it tells of the commit":

        def trap(node: Node, action: Action) -> bool:
            tells = isinstance(action, Send) and isinstance(action.message, Committed)
            if tells:
                swarm.world.after(0.0, partial(leader.die, "crash"))
            return tells

        swarm.traps.append(trap)


def sent(members: int, fault: str) -> Counter[type[Message]]:
    """Messages of one round and half a second after it, by kind. Latency 2 ms, steps of 0.2 s."""
    calm = Calm(members, latency=0.002, step=0.2, chunk_seconds=0.001 / members)
    counts: Counter[type[Message]] = Counter()
    send = calm.swarm.send

    def counted(node: Node, peer: PeerId, message: Message) -> None:
        counts[type(message)] += 1
        send(node, peer, message)

    calm.swarm.send = counted  # type: ignore[method-assign]
    calm.epochs(1)
    calm.run(20.0, calm.transferring)
    counts.clear()
    epoch = max(node.parameters.epoch for node in calm.nodes)
    befalls(calm, fault)
    calm.epochs(epoch + 1)
    calm.run(0.5)
    return counts


@pytest.mark.parametrize(
    "fault",
    [
        "nothing befalls anybody",
        "a member dies in the transfer",
        "the leader dies in the transfer",
        "the leader dies as it tells of the commit",
        "the leader stops in the transfer",
    ],
)
def test_no_kind_of_message_grows_as_the_square_of_the_group(fault: str) -> None:
    """Four times as many members send at most about eight times as many messages of a kind. BEGUN alone goes
    from each member to each: they find a leader that tells some of another round before they have its result.
    """
    few, many = sent(FEW, fault), sent(MANY, fault)
    for kind, count in many.items():
        if kind is not Begun:
            assert count / MANY <= 2 * few[kind] / FEW + SPARE, f"{kind.__name__}: {few[kind]}, {count}"
    assert many[Begun] <= 3 * MANY * MANY


def die_in_turn(calm: Calm, leader: Node) -> None:
    """Half of the members, one after the other."""
    for number, node in enumerate([node for node in calm.nodes if node is not leader][::2]):
        calm.swarm.world.after(0.01 * number, partial(node.die, "crash"))


def break_links(calm: Calm, leader: Node) -> None:
    """It stands still, and half of its links break meanwhile: it hears of one after the other."""
    leader.stop()
    for other in [node for node in calm.nodes if node is not leader][::2]:
        calm.swarm.reset(leader, other, "no answer")
        calm.swarm.world.after(0.01, partial(calm.swarm.link, leader, other))
    calm.swarm.world.after(0.1, leader.go_on)


@pytest.mark.parametrize("befall", [die_in_turn, break_links])
def test_a_leader_that_loses_many_asks_the_others_few_times(befall: Callable[[Calm, Node], None]) -> None:
    """What befalls members while a leader waits to ask again costs no attempt of its own: the messages of an
    epoch grow as the group, not as its square.
    """
    calm = Calm(LARGE, latency=0.002, step=0.2, chunk_seconds=0.001 / LARGE)
    calm.epochs(1)
    calm.run(20.0, calm.transferring)
    ballots: set[Ballot] = set()
    send = calm.swarm.send

    def noted(node: Node, peer: PeerId, message: Message) -> None:
        if isinstance(message, Prepare):
            ballots.add(message.ballot)
        send(node, peer, message)

    calm.swarm.send = noted  # type: ignore[method-assign]
    epoch = max(node.parameters.epoch for node in calm.nodes)
    befall(calm, calm.leader)
    calm.epochs(epoch + 1)
    assert 1 <= len(ballots) <= MOST_ASKED


@pytest.mark.parametrize("leader_first", [False, True])
def test_a_quick_round_says_nothing_twice(leader_first: bool) -> None:
    """READY tells the leader that a peer waits, COMMITTED tells it where all stand, and a round in lockstep
    follows whatever the others have: nothing else says so again.
    """
    pair = Pair(lockstep=True)
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(other, 0, LINEAGE))
    kinds: list[list[str]] = []
    for epoch in range(6):
        del pair.said[:]
        leader = pair.machines[ONE].leader
        for me in sorted((ONE, TWO), key=lambda peer: (peer == leader) != leader_first):
            pair.now += 0.01
            pair.feed(me, LocalProgress(16, 1e3, at_boundary=True, step_seconds=0.01, step_samples=16))
        kinds.append([type(message).__name__ for _, message in pair.said])
        assert {machine.epoch for machine in pair.machines.values()} == {epoch + 1}
        for me in (ONE, TWO):
            pair.feed(me, Applied(epoch + 1, pair.machines[me].lineage))
            pair.feed(me, LocalProgress(0, 1e3, at_boundary=False))
    asked = ["Prepare", "Promise"] if leader_first else ["Progress", "Prepare", "Promise"]
    assert kinds[-1] == [*asked, "Ready", "Begin", "Done", "Committed"]
    assert [type(message).__name__ for _, message in pair.said[len(kinds[-1]) :]] == ["Progress"]


def test_a_wait_that_ready_told_of_counts_when_the_attempt_is_over() -> None:
    """READY that crosses with the end of its attempt tells the leader all the same that the peer waits."""
    pair = Pair()
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(other, 0, LINEAGE))
    leader = pair.machines[ONE].leader
    assert leader is not None
    other = TWO if leader == ONE else ONE
    core = pair.machines[leader].core
    ballot = Ballot(0, 1, leader, 1, LINEAGE)  # led by nobody any more
    pair.feed(leader, Received(other, Ready(ballot, 1, 8, 8.0, b"", 0.5, 4)))
    facts = core.linked.get(other)
    assert facts is not None
    assert (facts.samples, facts.boundary, facts.pace.seconds, facts.pace.samples) == (8, True, 0.5, 4)
    assert Timer.TOTALS in core.timers  # the peer hears how far the others are


def test_done_ends_what_a_voter_said_of_its_waits() -> None:
    """A voter that is DONE waits for nobody any more, and nobody waits for what it receives."""
    core = (leader := Pair().machines[ONE]).core
    core.linked.up(PeerUp(TWO, 0, LINEAGE))
    ballot = Ballot(0, 1, ONE, 1, LINEAGE)
    proposal = Proposal(ballot, (ONE, TWO), (True, True), Plan((Part(0, 0, 5),)), 0.0, begun=True)
    proposal.heard = dict.fromkeys((ONE, TWO), 0.0)
    core.lead(proposal)
    leader.transfer.on_stalled(TWO, Stalled(ballot, (0,), (), 1))
    assert proposal.stalls == {1: ((0,), ())}
    assert [TWO in gathered for gathered in proposal.gathered_at] == [True, False, False]
    leader.transfer.on_done(TWO, Done(ballot, (b"d" * 32,)))
    assert not proposal.stalls
    assert all(TWO in gathered for gathered in proposal.gathered_at)


def test_what_came_of_a_quick_transfer_is_measured_when_it_is_done() -> None:
    """No beat saw it, and no word of it is said but DONE."""
    pair = Pair(lockstep=True)
    for me, other in ((ONE, TWO), (TWO, ONE)):
        pair.feed(me, PeerUp(other, 0, LINEAGE))
    pair.ranks = (RankProgress(1, 0, 1, 0, 10**9), RankProgress(0, 1, 0, 1, 10**9))
    for me in (ONE, TWO):
        pair.feed(me, LocalProgress(16, 1e3, at_boundary=True, step_seconds=0.01, step_samples=16))
    assert {machine.epoch for machine in pair.machines.values()} == {1}
    assert pair.machines[ONE].core.deadlines.least_rate(TWO) > LEAST_RATE
    assert not [message for _, message in pair.said if isinstance(message, Stalled)]


@pytest.mark.parametrize("members", [2, 8, 64, 65, 200])
def test_who_tells_its_begin_and_who_is_told_fit_each_other(members: int) -> None:
    """In groups as large as a run has each tells all; in larger ones a few, and those expect the word."""
    seats = tuple(Seat(rank.to_bytes(20, "big"), True) for rank in range(members))
    ballot = Ballot(0, 0, seats[0].peer, 1, LINEAGE)
    held = [Holding(ballot, seats, rank, Plan((Part(0, 0, 5),)), 0.0) for rank in range(members)]
    told = {(one.members[one.rank].peer, peer) for one in held for peer in one.told_ones}
    expected = {(peer, one.members[one.rank].peer) for one in held for peer in one.tellers}
    assert told == expected
    assert len(told) == members * (members - 1 if members <= 64 else 15)
