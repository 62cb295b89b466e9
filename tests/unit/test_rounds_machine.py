"""The rounds machine under a virtual clock: how fast it begins, reacts, waits, and what it leaves alone."""

from __future__ import annotations

import pytest

from p2pavg.rounds.events import Commit, JobDone, LocalProgress, OpenJob, Resume, Role, WaitAt
from p2pavg.rounds.machine import Machine
from p2pavg.transport.engine import Part
from tests.simulation.calm import Calm

LOOPBACK, WAN = 0.0001, 0.05  # one way, seconds


def test_a_swarm_of_one_needs_nobody() -> None:
    """A lone peer stops exactly at the step that reaches the target, and commits its own average."""
    machine = Machine(
        me=b"a" * 20,
        run_id="r",
        epoch=0,
        lineage=b"l" * 32,
        target=10,
        plan=lambda members: (Part(0, 0, 5),),
        now=0.0,
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
    calm.run(30.0, lambda: joiner.machine.role is Role.TRAINER and not joiner.machine.core.pending)
    goal = max(node.machine.epoch for node in calm.nodes) + 2
    calm.epochs(goal)
    contributions = [
        samples for peer, samples in calm.swarm.checks.counted[joiner.machine.lineage] if peer == joiner.me
    ]
    assert contributions


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
