"""Schedules that chance finds too rarely, written down step by step. They raise what they find broken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from p2pavg.rounds.machine.actions import Action, Send
from p2pavg.rounds.machine.rules.election import rendezvous
from p2pavg.rounds.protocol.ballot import PeerId
from p2pavg.rounds.protocol.messages import Aborted, Done, Prepare, Promise, Query
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node


def denied_to_a_successor() -> None:
    """A stopped leader comes back while its successor still waits for somebody's answer.

    One member is late with its result. The leader stops; the successor asks; the late member answers that it
    is not DONE; a third one stops before it can answer. Now the leader goes on, and the late member's result
    becomes whole: if it told so, the leader would commit what the successor is about to abort.
    """

    def slow(calm: Calm, leader: Node, late: Node) -> None:
        calm.swarm.network.ways[leader.me, late.me].chunk_seconds = 0.6

    _denied(slow)


def denied_while_it_became_whole() -> None:
    """The same, but the late member's engine is through, and its event loop sees that after the answer."""

    def lag(calm: Calm, leader: Node, late: Node) -> None:
        calm.swarm.lag = lambda node: 1e9 if node is late else 0.0  # type: ignore[method-assign]

    _denied(lag)


def _denied(hinder: Callable[[Calm, Node, Node], None]) -> None:
    calm = Calm(4, chunk_seconds=0.001)
    calm.epochs(2)
    leader = calm.leader
    successor, late, third = _roles(calm, leader)
    hinder(calm, leader, late)
    calm.run(10.0, lambda: _done(leader, successor, third))
    calm.run(0.05)
    job = next(iter(late.jobs.values()), None)
    assert job is not None, "the late member has no job to finish"

    def asks(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Query) and third.running:
            third.stop()
            return True
        return False

    def answers(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Promise) and node is late:
            calm.swarm.world.after(0.01, leader.go_on)
            if job.done:
                calm.swarm.lag = lambda node: 0.0  # type: ignore[method-assign]
                calm.swarm.world.after(0.0, job.tell)
            return True
        return False

    calm.swarm.traps += [asks, answers]
    leader.stop()
    calm.run(5.0)
    third.go_on()
    calm.epochs(5)
    assert not calm.swarm.traps, "the moments that this schedule waits for did not come"


def aborted_beside_a_successor() -> None:
    """A leader comes back and aborts what a member has told the successor that it holds.

    One member is late with its result when the leader stops, and stops before it can answer the successor;
    another one, which is DONE, has answered. Now the leader goes on, cut off from its successor, and its link
    to the late member breaks: it aborts the round, but only the successor's word counts.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.swarm.checks.forks_allowed = True
    calm.epochs(2)
    leader = calm.leader
    successor, late, third = _roles(calm, leader)
    calm.swarm.network.ways[leader.me, late.me].chunk_seconds = 0.6
    calm.run(10.0, lambda: _done(leader, successor, third))

    def asks(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Query) and late.running:
            late.stop()
            return True
        return False

    def answers(node: Node, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.message, Promise) and node is third:
            for a, b in ((leader, successor), (successor, leader)):
                calm.swarm.network.cut(a.me, b.me)
            calm.swarm.world.after(0.01, leader.go_on)
            calm.swarm.world.after(0.02, lambda: calm.swarm.reset(leader, late, "connection reset"))
            return True
        return False

    calm.swarm.traps += [asks, answers]
    leader.stop()
    calm.run(5.0)
    late.go_on()
    calm.swarm.link(leader, late)
    for a, b in ((leader, successor), (successor, leader)):
        calm.swarm.network.mend(a.me, b.me)
    calm.epochs(5)
    assert not calm.swarm.traps, "the moments that this schedule waits for did not come"


def a_ballot_that_the_successor_missed() -> None:
    """A successor learns from an answer of a ballot that it missed: its voters have to be asked, too.

    One member holds the first ballot of an epoch, and is stopped; its link to the leader breaks. The next
    ballot is another group's: with one that still applied the last average when the first was proposed. Then
    the leader dies, that one stops, and the first member goes on and asks those whom it knows.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.swarm.checks.forks_allowed = True
    calm.epochs(4)
    leader = calm.leader
    others = [node.me for node in calm.nodes if node is not leader]
    ranked = sorted(others, key=lambda me: sum(_named(leader, (me, other)) == me for other in others))
    answers, missed, late = (calm.swarm.nodes[me] for me in ranked)  # who is named last holds both ballots
    late.apply_seconds, slow = 1.0, answers
    epoch = leader.machine.epoch + 1
    calm.run(10.0, lambda: late.machine.core.here.pending and late.machine.epoch == epoch)
    calm.swarm.lag = lambda node: 1e9 if node is slow else 0.0  # type: ignore[method-assign]
    calm.run(10.0, lambda: bool(leader.jobs) and not _pending(leader, late))
    missed.stop()
    slow = late
    calm.swarm.reset(leader, missed, "no answer")
    calm.run(10.0, lambda: _done(leader, answers))
    leader.die("connection reset")
    late.stop()
    calm.run(0.01)
    missed.go_on()
    calm.run(5.0)
    assert calm.swarm.checks.said.asked, "nobody asked"
    late.go_on()
    slow = leader
    calm.epochs(epoch + 2)


def comes_back_without_its_memory() -> None:
    """A leader's host is cut off, and the leader dies when all others are DONE. A process of its name begins
    where they stand, and is linked before they give the leader up, or as they do: it may lead what comes, and
    cannot decide what was.
    """
    for seconds in (0.1, 0.15, 0.2, 0.5):
        _comes_back_after(seconds)


def _comes_back_after(seconds: float) -> None:
    calm = Calm(4, chunk_seconds=0.001)
    calm.epochs(2)
    leader = calm.leader
    others = [node for node in calm.nodes if node is not leader]
    calm.swarm.lag = lambda node: 1e9 if node is leader else 0.0  # type: ignore[method-assign]
    calm.run(10.0, lambda: _done(*others))
    ways = [(a.me, b.me) for other in others for a, b in ((leader, other), (other, leader))]
    for way in ways:
        calm.swarm.network.cut(*way)
    leader.die("connection reset")
    calm.nodes.append(calm.swarm.restart(leader, leader.saved))
    calm.run(seconds)
    for way in ways:
        calm.swarm.network.mend(*way)
    calm.epochs(5)
    longest = max(node.longest_stall for node in others)
    if longest > 1.0:
        calm.swarm.checks.broken("Live", f"{longest:.1f} s are spent on a process that knows nothing")


def replaced_while_it_was_away() -> None:
    """A member is DONE, and away; the others give its ballot up and average without it; their leader dies.

    When it is back, it asks what became of the ballot: nobody denies it, and nobody has committed it.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.swarm.checks.forks_allowed = True
    calm.epochs(2)
    leader = calm.leader
    away, late, third = _roles(calm, leader)
    calm.swarm.lag = lambda node: 1e9 if node is late else 0.0  # type: ignore[method-assign]
    calm.run(10.0, lambda: _done(leader, away, third))
    epoch = away.machine.epoch
    away.stop()
    calm.swarm.lag = lambda node: 0.0  # type: ignore[method-assign]
    calm.swarm.reset(leader, away, "no answer")
    others = [node for node in calm.nodes if node is not away]
    calm.run(10.0, lambda: all(node.parameters.epoch > epoch for node in others))
    leader.die("connection reset")
    calm.run(0.01)
    away.go_on()
    calm.epochs(epoch + 3)
    if len({average[0] for average in calm.swarm.checks.average.values()}) < len(calm.swarm.checks.average):
        calm.swarm.checks.broken("Equal", "two averages were made of one lineage")


def _named(leader: Node, peers: tuple[PeerId, ...]) -> PeerId | None:
    """Who of them succeeds the leader in its next epoch."""
    return rendezvous(b"simulated", leader.machine.epoch + 1, peers)


def _pending(node: Node, other: Node) -> bool:
    """Whether the node knows of the other that it has yet to apply an average."""
    facts = node.machine.core.linked.get(other.me)
    return facts is None or facts.pending


def _roles(calm: Calm, leader: Node) -> tuple[Node, Node, Node]:
    """Who is to succeed the leader, and the others."""
    others = [node for node in calm.nodes if node is not leader]
    named = rendezvous(b"simulated", leader.machine.epoch, tuple(node.me for node in others))
    successor = next(node for node in others if node.me == named)
    late, third = (node for node in others if node is not successor)
    return successor, late, third


def _done(*nodes: Node) -> bool:
    """Each has a whole result."""
    return all(any(job.done for job in node.jobs.values()) for node in nodes)


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
    calm.run(5.0, lambda: newcomer.machine.core.here.joining is not None)
    (donor,) = calm.nodes
    donor.die("connection reset")
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


def _late_in_a_round(calm: Calm, late: Node) -> None:
    """Until all but `late` have the result of a round whose leader sends to it slowly."""
    calm.swarm.network.ways[calm.leader.me, late.me].chunk_seconds = 2.0
    others = [node for node in calm.nodes if node is not late]
    calm.run(10.0, lambda: all(any(job.done for job in node.jobs.values()) for node in others))


def _dies(calm: Calm, node: Node) -> None:
    node.alive = False
    calm.swarm.world.after(0.01, lambda: calm.swarm.closed(node, "connection reset"))


def _balances(calm: Calm, departing: Node) -> None:
    """What a departing peer made is averaged once, or named."""
    calm.run(5.0, lambda: not departing.alive)
    goal = max(node.machine.epoch for node in calm.nodes if node.alive) + 3
    calm.epochs(goal)
    best = max((node for node in calm.nodes if node.alive), key=lambda node: node.machine.epoch)
    averaged = sum(
        1 for peer, _ in calm.swarm.checks.books.counted[best.machine.lineage] if peer == departing.me
    )
    if averaged + departing.discarded != departing.produced:
        calm.swarm.checks.broken(
            "Counted",
            f"{departing.name} made {departing.produced} samples: {averaged} are averaged, "
            f"{departing.discarded} were named as discarded",
        )


def leaves_what_was_averaged_without_it() -> None:
    """The leader dies when all but one have the result, and that one sleeps: the others commit without it.

    It wakes, hears that it is behind, and leaves. Its receivers have its samples in their average.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.epochs(2)
    sleeper = next(node for node in calm.nodes if node is not calm.leader)
    _late_in_a_round(calm, sleeper)
    epoch = sleeper.machine.epoch
    sleeper.stop()
    calm.swarm.checks.forks_allowed = True
    _dies(calm, calm.leader)
    others = [node for node in calm.nodes if node is not sleeper and node.alive]
    calm.run(5.0, lambda: all(node.machine.epoch > epoch for node in others))
    for node in others:
        node.hung = True  # the next epoch does not end before it leaves
    sleeper.go_on()
    calm.run(5.0, lambda: sleeper.machine.core.here.joining is not None)
    sleeper.leave()
    calm.run(5.0, lambda: not sleeper.alive)
    for node in others:
        node.hung = False
    _balances(calm, sleeper)


def leaves_with_the_only_word() -> None:
    """A successor dies when it has told one of two members that the round is void; that one leaves at once.

    The other one has the result, and nobody else is there to ask: only what the departing peer said tells it
    that the round was denied, and that the samples that it is offered are not in it.
    """
    calm = Calm(4, chunk_seconds=0.001)
    calm.epochs(2)
    leader = calm.leader
    others = [node for node in calm.nodes if node is not leader]
    named = rendezvous(b"simulated", leader.machine.epoch, tuple(node.me for node in others))
    successor = next(node for node in others if node.me == named)
    denier, _ = sorted((node for node in others if node is not successor), key=lambda node: node.me)
    _late_in_a_round(calm, denier)

    def tells(node: Node, action: Action) -> bool:
        told = isinstance(action, Send) and isinstance(action.message, Aborted) and action.peer == denier.me
        if told and node is successor:
            _dies(calm, successor)
            denier.leave()
        return told

    calm.swarm.traps.append(tells)
    _dies(calm, leader)
    calm.run(5.0, lambda: not successor.alive)
    if calm.swarm.traps:
        calm.swarm.checks.broken("Equal", "the successor does not abort what a member denied")
    _balances(calm, denier)


CRAFTED = (
    denied_to_a_successor,
    denied_while_it_became_whole,
    aborted_beside_a_successor,
    leaves_what_was_averaged_without_it,
    leaves_with_the_only_word,
    a_ballot_that_the_successor_missed,
    comes_back_without_its_memory,
    replaced_while_it_was_away,
    missed_the_proposal,
    left_without_a_state,
    heals_to_what_it_contributed_to,
)
