"""Schedules that chance finds too rarely, written down step by step. They raise what they find broken."""

from __future__ import annotations

from collections import deque

from p2pavg.rounds.machine.actions import Action, Send
from p2pavg.rounds.machine.election import rendezvous
from p2pavg.rounds.protocol.messages import Done, Prepare, Promise, Query
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node


def denied_to_a_successor() -> None:
    """A stopped leader comes back while its successor still waits for somebody's answer.

    One member is late with its result. The leader stops; the successor asks; the late member answers that it
    is not DONE; a third one stops before it can answer. Now the leader goes on, and the late member's result
    becomes whole: if it told so, the leader would commit what the successor is about to abort.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.epochs(2)
    leader = calm.leader
    others = [node for node in calm.nodes if node is not leader]
    named = rendezvous(b"simulated", leader.machine.epoch, tuple(node.me for node in others))
    successor = next(node for node in others if node.me == named)
    late, third = (node for node in others if node is not successor)
    calm.swarm.network.ways[leader.me, late.me].chunk_seconds = 0.6
    calm.run(
        10.0, lambda: all(any(job.done for job in node.jobs.values()) for node in (leader, successor, third))
    )

    def asks(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Query) and third.running:
            third.stop()
            return True
        return False

    def answers(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Promise) and node is late:
            calm.swarm.world.after(0.01, leader.go_on)
            return True
        return False

    calm.swarm.traps += [asks, answers]
    leader.stop()
    calm.run(5.0)
    third.go_on()
    calm.epochs(5)
    assert not calm.swarm.traps, "the moments that this schedule waits for did not come"


def missed_the_proposal() -> None:
    """A member sleeps through the proposals of an epoch, and the target cannot be reached without it.

    Nobody computes on: each brings one batch, and all batches together are the target. Whoever did not answer
    is left out of the epoch, but said nothing wrong: when it is back, it has to be asked again.
    """
    calm = Calm(3, batch=4, target=12)
    for node in calm.nodes:
        node.only_averages = True
    calm.epochs(2)
    leader = calm.leader
    sleeper = next(node for node in calm.nodes if node is not leader)

    def proposes(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Prepare) and sleeper.running:
            sleeper.stop()
            return True
        return False

    calm.swarm.traps.append(proposes)
    calm.run(10.0, lambda: any(trace.kind == "excluded" for _, _, trace in calm.traced))
    assert any(trace.kind == "excluded" for _, _, trace in calm.traced), "the sleeper was not left out"
    epoch = leader.machine.epoch
    sleeper.go_on()
    calm.epochs(epoch + 2)
    weights = {len(calm.swarm.checks.average[line][1]) for line in calm.swarm.checks.average}
    assert weights == {3}, "an average was made without the sleeper"


def left_without_a_state() -> None:
    """The only peer that has the state dies while a newcomer downloads it: there is no run to go on with.

    The newcomer waits, as long as that takes: with parameters of its own it would train apart.
    """
    calm = Calm(1, batch=4, target=12)
    calm.swarm.state_seconds = 1.0
    calm.epochs(2)
    newcomer = calm.swarm.add(Role.JOINER, 0.02, 4)
    calm.run(5.0, lambda: newcomer.machine.core.joining is not None)
    (donor,) = calm.nodes
    donor.alive = False
    calm.swarm.closed(donor, "connection reset")
    calm.run(20.0)
    assert newcomer.machine.role is Role.JOINER, "a newcomer without a state takes part"


def heals_to_what_it_contributed_to() -> None:
    """A member is cut off when it has contributed, and heals to a state that is older than that round.

    What it contributed is in a result that follows on that state: it is not lost.
    """
    calm = Calm(3, chunk_seconds=0.001)
    calm.epochs(2)
    victim = next(node for node in calm.nodes if node is not calm.leader)

    def told_done(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Done) and node is victim:
            victim.stop()
            return True
        return False

    calm.swarm.traps.append(told_done)
    calm.run(10.0, lambda: not victim.running)
    epoch = victim.machine.epoch
    others = [node for node in calm.nodes if node is not victim]
    calm.run(10.0, lambda: all(node.parameters.epoch > epoch + 1 for node in others))
    for node in others:
        node.past = deque(past for past in node.past if past.epoch == epoch)
    calm.swarm.only_old = True
    victim.go_on()
    calm.epochs(epoch + 4)
    for node in calm.nodes:
        node.only_averages = True
    calm.run(5.0)
    calm.swarm.checks.at_the_end(epoch + 4)


CRAFTED = (
    denied_to_a_successor,
    missed_the_proposal,
    left_without_a_state,
    heals_to_what_it_contributed_to,
)
