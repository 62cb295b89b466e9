"""The rounds machine under a virtual clock: how fast it begins, reacts, waits, and what it leaves alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from p2pavg.plan import Plan
from p2pavg.plan.part import Part
from p2pavg.rounds.machine.actions import Action, Commit, Discarded, OpenJob, Resume, Send, WaitAt
from p2pavg.rounds.machine.events import (
    Applied,
    Event,
    Healed,
    JobDone,
    LinksMeasured,
    LocalProgress,
    PeerDown,
    PeerUp,
    Received,
    Tick,
)
from p2pavg.rounds.machine.machine import Machine
from p2pavg.rounds.machine.memory.config import Config
from p2pavg.rounds.protocol.ballot import Ballot
from p2pavg.rounds.protocol.causes import Cause, Objection
from p2pavg.rounds.protocol.messages import Aborted, Done, Links, Prepare, Progress, Promise, Ready, Refuse
from p2pavg.rounds.protocol.roles import Generation, LinkFacts, PlanMember, Role
from tests.simulation import said
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

LOOPBACK, WAN = 0.0001, 0.05  # one way, seconds


def steps(node: Node, twice: float = 0.0) -> Callable[[], float]:
    """Steps of nearly equal length, a share of them twice as long."""
    dice = random.Random(node.name)
    return lambda: dice.uniform(0.9, 1.1) * (1 + (dice.random() < twice))


def test_a_swarm_of_one_needs_nobody() -> None:
    """A lone peer stops exactly at the step that reaches the target, and commits its own average."""
    machine = Machine(
        Config(
            me=b"a" * 20,
            run_id="r",
            epoch=0,
            lineage=b"l" * 32,
            target=10,
            plan=lambda members: Plan((Part(0, 0, 5),)),
        ),
        0.0,
    )
    actions = machine.handle(LocalProgress(5, 1.0, at_boundary=True), 0.1)
    assert [type(a) for a in actions if isinstance(a, (Resume, OpenJob))] == [Resume]
    actions = machine.handle(LocalProgress(10, 1.0, at_boundary=True), 0.2)
    opened = next(a for a in actions if isinstance(a, OpenJob))
    actions = machine.handle(JobDone(opened.transfer, (b"d" * 32,)), 0.3)
    commit = next(a for a in actions if isinstance(a, Commit))
    assert (commit.samples, commit.weights, commit.late) == ((10,), (10.0,), False)
    assert machine.epoch == 1
    assert machine.lineage == commit.lineage


@pytest.mark.parametrize(("peers", "each"), [(2, 1), (2, 4), (4, 1), (4, 4), (8, 1)])
def test_an_epoch_ends_within_one_step_of_each_peer_of_the_target(peers: int, each: int) -> None:
    """Peers of one speed stop at the steps that reach the target together: it was 29 samples where 16 were
    asked. What the first epochs do not know of each other's steps may cost a step of each.
    """
    batch, target = 4, 4 * peers * each
    calm = Calm(peers, step=0.1, batch=batch, target=target)
    sizes: list[int] = []
    for node in calm.nodes:
        node.noise = steps(node)
    applied = calm.swarm.applied

    def record(node: Node, commit: Commit, job: Any) -> None:
        applied(node, commit, job)
        if node is calm.nodes[0]:
            sizes.append(sum(commit.samples))

    calm.swarm.applied = record  # type: ignore[method-assign]
    calm.epochs(30)
    assert max(sizes[3:]) <= target + batch * peers
    assert sum(sizes[3:]) <= 1.1 * target * len(sizes[3:])


def test_links_rates_reach_the_next_plan() -> None:
    """What a member measured of its links, as it tells the leader, is known when that plans the next
    epoch.
    """
    me, other, lineage = b"a" * 20, b"b" * 20, b"l" * 32
    plans: list[list[dict[bytes, LinkFacts]]] = []

    def plan(members: Sequence[PlanMember]) -> Plan:
        plans.append([dict(member.links) for member in members])
        return Plan((Part(0, 0, 5),))

    machine = Machine(Config(me=me, run_id="r", epoch=0, lineage=lineage, target=10, plan=plan), 0.0)
    machine.core.sticky = me
    machine.handle(PeerUp(other, 0, lineage, leader=me), 0.1)
    for epoch, at in ((0, 0.2), (1, 1.2)):
        actions = machine.handle(LocalProgress(10, 1.0, at_boundary=True), at)
        opened = next(a for a in actions if isinstance(a, OpenJob))
        machine.handle(Received(other, Promise(opened.ballot, None, opened.ballot)), at + 0.1)
        machine.handle(Received(other, Ready(opened.ballot, 1, 10, 10.0, b"", 0.0, 0)), at + 0.2)
        machine.handle(LinksMeasured({other: LinkFacts(5e6, 0.1)}), at + 0.3)
        machine.handle(JobDone(opened.transfer, (b"d" * 32,)), at + 0.3)
        machine.handle(Received(other, Links(((me, 7e6, 0.2),))), at + 0.4)
        actions = machine.handle(Received(other, Done(opened.ballot, (b"d" * 32,))), at + 0.4)
        commit = next(a for a in actions if isinstance(a, Commit))
        machine.handle(Applied(epoch + 1, commit.lineage), at + 0.5)
        progress = machine.core.progress()
        machine.handle(Received(other, replace(progress, boundary=False, samples=0)), at + 0.6)
    assert plans == [[{}, {}], [{other: LinkFacts(5e6, 0.1)}, {me: LinkFacts(7e6, 0.2)}]]


def test_a_leader_is_told_of_the_links_once() -> None:
    """A member tells whoever leads of its links: each measurement, and all that it knows over a new link."""
    me, other, lineage = b"b" * 20, b"a" * 20, b"l" * 32
    machine = Machine(
        Config(me=me, run_id="r", epoch=0, lineage=lineage, target=99, plan=lambda members: Plan(())), 0.0
    )
    machine.core.follow(other)

    def told(*events: Event) -> list[Links]:
        actions = [action for event in events for action in machine.handle(event, 0.1)]
        return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Links)]

    up = PeerUp(other, 0, lineage, leader=other)
    first, second = {other: LinkFacts(0.0, 0.1)}, {other: LinkFacts(1e6, 0.1)}
    assert told(LinksMeasured(first)) == []
    assert told(up, Tick(), Tick()) == [Links(((other, 0.0, 0.1),))]
    assert told(LinksMeasured(second), Tick()) == [Links(((other, 1e6, 0.1),))]
    assert told(PeerDown(other, "broken")) == []
    assert told(up) == [Links(((other, 1e6, 0.1),))]


@pytest.mark.parametrize("latency", [LOOPBACK, 0.001, WAN, 0.1])
@pytest.mark.parametrize("steps_each", [1, 10])
def test_short_steps_end_an_epoch_near_its_target(
    latency: float, steps_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 3 ms, shorter than the way of a word: once shares are known, averages hold at most one step
    of each peer more than the target, or a third more; without shares they hold up to four times as much.
    """
    monkeypatch.setattr(said, "MOST_MESSAGES", 10_000)  # a hundred epochs a second
    calm = Calm(4, latency=latency, step=0.003, batch=4, target=16 * steps_each)
    samples: dict[int, int] = {}
    acted = calm.swarm.acted

    def record(node: Node, action: Action) -> None:
        acted(node, action)
        if isinstance(action, Commit):
            samples[action.ballot.epoch] = sum(action.samples)

    calm.swarm.acted = record  # type: ignore[method-assign]
    calm.epochs(30, 600.0)
    known = [samples[epoch] for epoch in range(5, 30)]
    assert 16 * steps_each <= sum(known) / len(known) <= max(32, 16 * steps_each * 4 / 3)


@pytest.mark.parametrize("absent", [False, True])
def test_all_members_get_one_note(absent: bool) -> None:
    """Every member commits with the note of the leader, or of the first that is ready when it computes on."""
    calm = Calm(3, step=0.02, batch=4, target=24)
    calm.epochs(2)
    committed: dict[int, set[bytes]] = {}
    acted = calm.swarm.acted

    def record(node: Node, action: Action) -> None:
        acted(node, action)
        if isinstance(action, Commit):
            committed.setdefault(action.ballot.epoch, set()).add(action.note)

    calm.swarm.acted = record  # type: ignore[method-assign]
    leader = calm.leader
    leader.hung = absent
    if absent:
        calm.run(30.0, lambda: bool(committed))
        assert calm.leader is leader
        others = min(node.me for node in calm.nodes if node is not leader)
        assert committed[min(committed)] == {others}
    else:
        calm.epochs(4)
        assert set(map(frozenset, committed.values())) == {frozenset({leader.me})}


def test_a_peer_stops_at_the_step_that_reaches_the_target() -> None:
    """A lone peer averages exactly the target, from the first epoch on; so after a new target."""
    calm = Calm(1, step=0.005, batch=16, target=64)
    calm.epochs(3)
    assert calm.nodes[0].machine.total_samples == 3 * 64
    calm.swarm.target = calm.nodes[0].machine.target = 128
    calm.epochs(5)
    assert calm.nodes[0].machine.total_samples == 3 * 64 + 2 * 128


@pytest.mark.parametrize("peers", [2, 4])
def test_the_last_steps_of_an_epoch_are_counted_once(peers: int) -> None:
    """Over several peers an epoch is larger than the target by less than one more step of each."""
    calm = Calm(peers, step=0.02, batch=4, target=40 * peers)
    calm.epochs(8)
    assert 40 * peers <= calm.leader.machine.total_samples / 8 < 44 * peers


def test_samples_of_a_void_average_are_named_once() -> None:
    """A peer that heals with an average committed and not applied loses what is in it, and loses it once."""
    lineage, ahead = b"l" * 32, b"m" * 32
    machine = Machine(
        Config(
            me=b"a" * 20,
            run_id="r",
            epoch=0,
            lineage=lineage,
            target=10,
            plan=lambda members: Plan((Part(0, 0, 5),)),
        ),
        0.0,
    )
    actions = machine.handle(LocalProgress(10, 1.0, at_boundary=True), 0.2)
    opened = next(a for a in actions if isinstance(a, OpenJob))
    machine.handle(JobDone(opened.transfer, (b"d" * 32,)), 0.3)
    machine.handle(PeerUp(b"b" * 20, 5, ahead), 0.4)
    history = (Generation(4, ahead, 1, 10, 50, b"b" * 20),)
    actions = machine.handle(Healed(5, ahead, history, dropped=10 + 3), 0.5)
    assert [a.samples for a in actions if isinstance(a, Discarded)] == [13]


@pytest.mark.parametrize(("step", "latency"), [(0.05, LOOPBACK), (1.0, LOOPBACK), (1.0, WAN)])
def test_peers_of_one_pace_meet_without_another_step(step: float, latency: float) -> None:
    """Four peers that each need four steps take four: whoever comes first waits for the others' steps."""
    calm = Calm(4, latency=latency, step=step, batch=16, target=256)
    for node in calm.nodes:
        node.noise = steps(node)
    calm.epochs(10, limit=300.0)
    assert calm.leader.machine.total_samples <= 1.02 * 10 * 256
    assert not any(trace.fields["late"] for _, _, trace in calm.traced if trace.kind == "committed")


def test_a_step_of_twice_the_usual_length_costs_no_vote() -> None:
    """On a busy machine one step in ten takes twice as long: its samples are averaged all the same."""
    calm = Calm(4, step=0.2)
    for node in calm.nodes:
        node.noise = steps(node, twice=0.1)
    calm.epochs(40, limit=300.0)
    late = [trace.fields["late"] for _, _, trace in calm.traced if trace.kind == "committed"]
    assert sum(late) <= 0.02 * len(late)


def test_who_waits_for_a_hung_trainer_goes_on() -> None:
    """A step that never ends is expected for two steps; then those that waited for it compute on."""
    calm = Calm(2, step=0.2, batch=4, target=80)
    calm.epochs(2)
    hung, other = calm.nodes
    hung.hung = True
    before = other.produced
    calm.run(10.0, lambda: other.machine.epoch >= 3)
    assert other.machine.epoch >= 3
    assert other.produced - before >= 60


@pytest.mark.parametrize("latency", [LOOPBACK, WAN])
def test_a_round_begins_within_three_round_trips(latency: float) -> None:
    """From the target reached to the first gradient byte: at most 3 RTT + 50 ms, and a step."""
    calm = Calm(4, latency=latency, step=0.02)
    calm.epochs(6)
    for epoch in range(1, 6):
        reached, begun = calm.times("reached", epoch)[0], calm.times("begun", epoch)[-1]
        assert begun - reached <= 3 * 2 * latency + 0.05 + 0.02 * 1.3


@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_killed_peer_costs_a_fraction_of_a_second(who: str) -> None:
    """SIGKILL in a transfer on loopback: the survivors begin the next attempt within 0.3 s."""
    calm = Calm(4, chunk_seconds=0.01)
    calm.epochs(3)
    calm.run(10.0, calm.transferring)
    victim = calm.leader if who == "leader" else next(n for n in calm.nodes if n is not calm.leader)
    epoch, killed_at = calm.leader.machine.epoch, calm.swarm.world.now
    victim.alive = False
    calm.swarm.closed(victim, "connection reset")
    calm.epochs(epoch + 1)
    assert calm.times("begun", epoch)[-1] - killed_at <= 0.3


def test_what_the_leader_missed_while_the_link_came_up_is_said_again() -> None:
    """A peer that has said all before the leader's side of the link was ready says it again."""
    me, leader, lineage = b"a" * 20, b"b" * 20, b"l" * 32
    machine = Machine(
        Config(me=me, run_id="r", epoch=0, lineage=lineage, target=10, plan=lambda members: Plan(())), 0.0
    )
    machine.handle(PeerUp(leader, 0, lineage, leader=leader), 0.1)
    machine.core.sticky = leader

    def said(event: Event, now: float) -> list[int]:
        sent = [a.message for a in machine.handle(event, now) if isinstance(a, Send)]
        return [message.samples for message in sent if isinstance(message, Progress)]

    assert said(LocalProgress(5, 1.0, at_boundary=True), 0.2) == [5]
    assert said(LocalProgress(5, 1.0, at_boundary=True), 0.3) == []
    assert said(
        Received(
            leader,
            Machine(
                Config(
                    me=leader, run_id="r", epoch=0, lineage=lineage, target=10, plan=lambda members: Plan(())
                ),
                0.0,
            ).core.progress(),
        ),
        0.4,
    ) == [5]


def _leader_of_three() -> tuple[Machine, Progress]:
    """A leader whose target needs two more, and what each of these tells it."""
    me = b"a" * 20
    machine = Machine(
        Config(
            me=me,
            run_id="r",
            epoch=0,
            lineage=b"l" * 32,
            target=3,
            plan=lambda members: Plan((Part(0, 0, 9),)),
        ),
        0.0,
    )
    machine.core.sticky = me
    return machine, replace(machine.core.progress(), samples=1, boundary=True, leader=me)


def test_attempts_last_until_links_come_up() -> None:
    """Two members without a link yet, and a target that needs both: the attempts are not used up at once."""
    machine, told = _leader_of_three()
    me, one, two, lineage, now = machine.core.me, b"b" * 20, b"c" * 20, machine.core.here.lineage, 0.0
    queue: list[Event] = [PeerUp(peer, 0, lineage, leader=me) for peer in (one, two)]
    queue += [Received(peer, told) for peer in (one, two)]
    queue.append(LocalProgress(1, 1.0, at_boundary=True))
    asked_at = []
    for _ in range(200):
        actions = machine.handle(queue.pop(0) if queue else Tick(), now)
        messages = [action.message for action in actions if isinstance(action, Send) and action.peer == one]
        if any(isinstance(message, Aborted) and message.final for message in messages):
            break
        for message in messages:
            if isinstance(message, Prepare):
                asked_at.append(now)
                queue += [
                    Received(it, Refuse(message.ballot, 0, lineage, Objection.NO_LINK, None, (other,)))
                    for it, other in ((one, two), (two, one))
                ]
        if not queue:
            assert machine.next_deadline is not None
            now = max(now, machine.next_deadline)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    met, apart = [gap for gap in gaps if gap == pytest.approx(0.15)], gaps[-6:]
    assert len(gaps) == len(met) + len(apart)
    assert 1.0 <= sum(met) <= 1.2  # links of who has just come may be coming up
    assert apart == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.4, 0.8])  # the first is free: then they own nothing


def test_who_lacks_a_link_that_comes_up_is_waited_for_once() -> None:
    """One end of a link knows of it before the other. So who has just come is asked again for a second, then
    left out; and at once when it comes back and says so again.
    """
    machine, told = _leader_of_three()
    me, one, two, lineage, now = machine.core.me, b"b" * 20, b"c" * 20, machine.core.here.lineage, 0.0

    def until_blamed(events: list[Event]) -> list[float]:
        """When each attempt began of which `one` says that it has no link to `two`, who has one."""
        nonlocal now
        queue, asked_at = events, []
        for _ in range(200):
            actions = machine.handle(queue.pop(0) if queue else Tick(), now)
            for message in [a.message for a in actions if isinstance(a, Send) and a.peer == one]:
                if isinstance(message, Prepare):
                    asked_at.append(now)
                    no = Refuse(message.ballot, 0, lineage, Objection.NO_LINK, None, (two,))
                    yes = Promise(message.ballot, None, message.ballot)
                    queue += [Received(one, no), Received(two, yes)]
                elif isinstance(message, Aborted) and message.blamed:
                    assert message.blamed == (one,)
                    return asked_at
            if not queue:
                assert machine.next_deadline is not None
                now = max(now, machine.next_deadline)
        raise AssertionError("nobody was blamed")

    first = until_blamed(
        [PeerUp(peer, 0, lineage, leader=me) for peer in (one, two)]
        + [Received(peer, told) for peer in (one, two)]
        + [LocalProgress(1, 1.0, at_boundary=True)]
    )
    assert 1.0 <= first[-1] - first[0] <= 1.2
    again = until_blamed([PeerDown(one, "cut"), PeerUp(one, 0, lineage, leader=me), Received(one, told)])
    assert len(again) == 1


def test_a_pair_without_a_link_is_waited_for_once_however_often_one_comes_back() -> None:
    """Two that name each other, one of which reconnects all the time, hold up no round for ever."""
    me, one, two, lineage = b"a" * 20, b"b" * 20, b"c" * 20, b"l" * 32
    config = Config(
        me=me, run_id="r", epoch=0, lineage=lineage, target=3, plan=lambda members: Plan((Part(0, 0, 9),))
    )
    machine, now, ended, came_at = Machine(config, 0.0), 0.0, list[Cause](), 0.0
    machine.core.sticky = me
    told = replace(machine.core.progress(), samples=1, boundary=True, leader=me)
    coming = [PeerUp(one, 0, lineage, leader=me), Received(one, told)]
    queue: list[Event] = [*coming, PeerUp(two, 0, lineage, leader=me), Received(two, told)]
    queue.append(LocalProgress(1, 1.0, at_boundary=True))
    while now < 4.0:
        if not queue and machine.core.proposal is None and now >= came_at + 0.5:
            came_at, queue = now, [PeerDown(one, "cut"), *coming, Tick()]
        for action in machine.handle(queue.pop(0) if queue else Tick(), now):
            if not isinstance(action, Send) or action.peer not in (one, two):
                continue
            if isinstance(action.message, Prepare):
                other = two if action.peer == one else one
                no = Refuse(action.message.ballot, 0, lineage, Objection.NO_LINK, None, (other,))
                queue.append(Received(action.peer, no))
            elif isinstance(action.message, Aborted):
                ended.append(action.message.cause)
        if not queue:
            now += 0.05
    assert Cause.MEETING in ended
    assert Cause.UNLINKED in ended


@pytest.mark.parametrize(("cause", "back"), [(Cause.UNLINKED, True), (Cause.WRONG_RESULT, False)])
def test_members_readmit_whom_their_leader_readmits(cause: Cause, back: bool) -> None:
    """Whoever succeeds a leader counts all that the leader listed at last; but for who was at fault."""
    me, leader, third, lineage = b"a" * 20, b"b" * 20, b"c" * 20, b"l" * 32
    plan = Plan((Part(0, 0, 9),))
    machine = Machine(
        Config(
            me=me, run_id="r", epoch=0, lineage=lineage, target=9, plan=lambda members: Plan((Part(0, 0, 9),))
        ),
        0.0,
    )
    for peer in (leader, third):
        machine.handle(PeerUp(peer, 0, lineage, leader=leader), 0.1)
    machine.core.exclude(third, cause)
    ballot = Ballot(0, 1, leader, 7, lineage)
    proposal = Prepare(ballot, (leader, me, third), (True, True, True), plan)
    machine.handle(Received(leader, proposal), 0.2)
    assert (third not in machine.core.epoch_state.excluded) is back


@pytest.mark.parametrize(("faults", "deposed"), [(2, False), (3, True)])
def test_a_leader_is_judged_by_the_members_it_had(faults: int, deposed: bool) -> None:
    """A leader that leaves two of five out keeps the lead, also with a member that hears only few of the five
    any more; one that leaves out most of them loses it.
    """
    me, leader, *others = (bytes([n]) * 20 for n in range(1, 6))
    lineage, plan = b"l" * 32, Plan((Part(0, 0, 9),))
    machine = Machine(
        Config(me=me, run_id="r", epoch=0, lineage=lineage, target=9, plan=lambda members: plan), 0.0
    )
    for peer in (leader, *others):
        machine.handle(PeerUp(peer, 0, lineage, leader=leader), 0.1)
    ballot = Ballot(0, 0, leader, 7, lineage)
    machine.handle(Received(leader, Prepare(ballot, (leader, me, *others), (True,) * 5, plan)), 0.2)
    assert machine.core.holding is not None
    for peer in others[:2]:
        machine.handle(PeerDown(peer, "cut"), 0.3)
    blamed = (me, *others)[:faults]
    machine.handle(Received(leader, Aborted(ballot, ballot, Cause.COMPLAINT, "", blamed, False)), 0.4)
    assert machine.core.holding is None
    assert machine.core.idle_leaders.is_out(leader, 0) is deposed


@pytest.mark.parametrize(("latency", "limit"), [(LOOPBACK, 1.5), (WAN, 2.5)])
@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_stopped_peer_costs_one_deadline(who: str, latency: float, limit: float) -> None:
    """SIGSTOP in a transfer: the others commit without it within 1.5 s on loopback, 2.5 s at 100 ms RTT."""
    calm = Calm(4, latency=latency, chunk_seconds=0.01)
    calm.epochs(3)
    calm.run(10.0, calm.transferring)
    victim = calm.leader if who == "leader" else next(n for n in calm.nodes if n is not calm.leader)
    epoch, stopped_at = calm.leader.machine.epoch, calm.swarm.world.now
    victim.stop()
    calm.epochs(epoch + 1)
    assert calm.times("committed", epoch)[-1] - stopped_at <= limit


def test_a_stopped_peer_that_comes_back_heals() -> None:
    """After SIGCONT it loads the others' state, names what it lost, and contributes again."""
    calm = Calm(3)
    calm.epochs(3)
    victim = calm.leader
    victim.stop()
    calm.run(4.0)
    victim.go_on()
    goal = max(node.machine.epoch for node in calm.nodes) + 3
    calm.epochs(goal)
    calm.swarm.checks.at_the_end(goal)


def test_a_slow_but_moving_peer_stays() -> None:
    """A member whose chunks take fifty times as long as the others' is waited for, not dropped."""
    calm = Calm(3, chunk_seconds=0.01)
    calm.epochs(2)
    slow = calm.nodes[-1]
    for (sender, _), way in calm.swarm.network.ways.items():
        if sender == slow.me:
            way.chunk_seconds = 0.5
    calm.epochs(4)
    assert not calm.times("excluded", 2)
    assert not calm.times("excluded", 3)


def test_a_straggler_has_weight_zero_and_keeps_its_samples() -> None:
    """Who is in a step twenty times as long as an epoch's patience gets the result late and loses nothing."""
    calm = Calm(3, step=0.02, slow=60.0, target=160)
    calm.epochs(4)
    straggler = calm.nodes[-1]
    assert calm.swarm.checks.late > 0
    assert straggler.discarded == 0 or straggler.machine.epoch > 4
    goal = max(node.machine.epoch for node in calm.nodes) + 1
    calm.epochs(goal)
    calm.swarm.checks.at_the_end(goal)


def test_a_trainer_that_never_steps_holds_nobody_up() -> None:
    """A hung training thread costs the others no more than their patience, once."""
    calm = Calm(3)
    calm.epochs(2)
    calm.nodes[-1].hung = True
    began = calm.swarm.world.now
    calm.run(30.0, lambda: min(n.parameters.epoch for n in calm.nodes[:-1]) >= 8)
    assert calm.swarm.world.now - began < 6.0


def test_a_joiner_gets_in_while_the_others_train() -> None:
    """A newcomer downloads the state, follows the results meanwhile, and is a voter a few epochs later."""
    calm = Calm(2, step=0.05)
    calm.epochs(2)
    joiner = calm.swarm.add(Role.JOINER, 0.05, 4)
    calm.nodes.append(joiner)
    calm.run(30.0, lambda: joiner.machine.role is Role.TRAINER and not joiner.machine.core.here.pending)
    goal = max(node.machine.epoch for node in calm.nodes) + 2
    calm.epochs(goal)
    final = calm.swarm.checks.books.counted[joiner.machine.lineage]
    assert any(peer == joiner.me for peer, _ in final)


def test_a_clock_that_jumps_blames_nobody() -> None:
    """Ten minutes that pass at once on one peer's clock make it suspect nobody."""
    calm = Calm(3)
    calm.epochs(2)
    calm.leader.clock_offset += 600.0
    calm.epochs(5)
    assert not [trace for _, _, trace in calm.traced if trace.kind in ("excluded", "silent", "aborted")]


def test_the_leader_stays() -> None:
    """Without faults one peer leads all epochs, and no attempt fails."""
    calm = Calm(5)
    calm.epochs(8)
    leaders = {trace.fields["leader"] for _, _, trace in calm.traced if trace.kind == "proposed"}
    assert len(leaders) == 1
    assert not [trace for _, _, trace in calm.traced if trace.kind == "aborted"]


def test_waiting_for_others_stops_at_the_right_step() -> None:
    """The training thread is told the others' samples, so that it stops when the rest is counted."""
    calm = Calm(2, step=0.05)
    seen: list[int] = []
    acted = calm.swarm.acted

    def record(node, action):  # type: ignore[no-untyped-def]
        acted(node, action)
        if isinstance(action, WaitAt) and action.others_samples is not None:
            seen.append(action.others_samples)

    calm.swarm.acted = record  # type: ignore[method-assign]
    calm.epochs(3)
    overshoot = [sum(s) for _, _, _, s in _committed(calm)]
    assert max(seen) > 0
    assert all(80 <= samples <= 80 + 2 * 4 * 2 for samples in overshoot)


def _committed(calm: Calm) -> list[tuple[object, ...]]:
    return [
        (before, members, weights, tuple(int(weight) for weight in weights))
        for before, members, weights, _ in calm.swarm.checks.average.values()
    ]


@pytest.mark.parametrize("latency", [LOOPBACK, WAN])
@pytest.mark.parametrize("incoming", [True, False])
def test_a_leader_cut_off_in_one_direction_costs_the_others_one_deadline(
    latency: float, incoming: bool
) -> None:
    """A leader that is heard but hears nobody is lost to the others as one that is not heard: they go on
    without it within two seconds, though its words still come.
    """
    calm = Calm(4, latency=latency)
    calm.epochs(2)
    leader = calm.leader
    others = [node for node in calm.nodes if node is not leader]
    for node in others:
        node.longest_stall = 0.0
        calm.swarm.network.cut(*((node.me, leader.me) if incoming else (leader.me, node.me)))
    calm.swarm.checks.forks_allowed = True
    before = max(node.parameters.epoch for node in others)
    calm.run(10.0, lambda: all(node.parameters.epoch > before + 3 for node in others))
    assert all(node.parameters.epoch > before + 3 for node in others)
    assert max(node.longest_stall for node in others) < 2.0
