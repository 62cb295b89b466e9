"""A pair whose link is broken, one of the two the leader, and no links tell of it: nobody goes on alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pavg.rounds.machine.actions import Action, Commit
from p2pavg.rounds.machine.memory.unlinked import KEPT_S, MOST_NAMED, NO_LINK_S, Unlinked
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

A, B = (letter * 20 for letter in (b"a", b"b"))
AFTER_S = 8.0  # virtual seconds that a swarm runs after the cut
SETTLED_S = 5.0  # of them, until all average together again


class Parted(Calm):
    """A leader and another peer lose each other for good, and somebody else reaches both."""

    def __init__(self, peers: int) -> None:
        super().__init__(peers, latency=0.002, chunk_seconds=0.002)
        self.alone: list[str] = []  # who made an average alone, though others that train were in reach
        self.shares: list[tuple[float, int]] = []  # when an average was made, and of how many contributions
        acted = self.swarm.acted

        def watched(node: Node, action: Action) -> None:
            acted(node, action)
            if isinstance(action, Commit):
                others = [other for other in self.nodes if self.swarm.reaches(node, other)]
                if len(action.members) == 1 and any(other.machine.role is Role.TRAINER for other in others):
                    self.alone.append(node.name)
                self.shares.append((self.swarm.world.now, sum(weight > 0 for weight in action.weights)))

        self.swarm.acted = watched  # type: ignore[method-assign]

    def part(self, how: str) -> None:
        """Cut the leader off from another one."""
        leader = self.leader
        other = next(node for node in self.nodes if node is not leader)
        if how == "no route":
            self._forbid({leader, other})
            self.swarm.reset(leader, other, "no route")
        for a, b in ((leader, other), (other, leader)):
            if how in ("silent", "silent to the leader" if b is leader else "silent from the leader"):
                self.swarm.network.cut(a.me, b.me)

    def join(self) -> None:
        """A newcomer that gets no link to the leader."""
        pair = {self.leader}
        self._forbid(pair)
        newcomer = self.swarm.add(Role.JOINER, 0.02, 4)
        pair.add(newcomer)
        self.nodes.append(newcomer)

    def _forbid(self, pair: set[Node]) -> None:
        link = self.swarm.link
        self.swarm.link = lambda a, b: None if {a, b} == pair else link(a, b)  # type: ignore[method-assign]

    def averages_together(self) -> None:
        """Nobody went on alone, nothing was lost, and soon all contribute to all averages."""
        cut = self.swarm.world.now
        self.run(AFTER_S)
        assert self.alone == []
        epochs = [node.machine.epoch for node in self.nodes]
        assert max(epochs) - min(epochs) <= 1
        assert [node.discarded for node in self.nodes] == [0] * len(self.nodes)
        later = [share for at, share in self.shares if at > cut + SETTLED_S]
        assert later.count(len(self.nodes)) >= 0.9 * len(later) > 0


def counting(swarm: Parted) -> None:
    swarm.run(0.05)


def proposed(swarm: Parted) -> None:
    swarm.run(10.0, lambda: any(node.machine.core.proposal is not None for node in swarm.nodes))


def transferring(swarm: Parted) -> None:
    swarm.run(10.0, swarm.transferring)


def committing(swarm: Parted) -> None:
    swarm.run(10.0, lambda: any(job.done for node in swarm.nodes for job in node.jobs.values()))


@pytest.mark.parametrize("how", ["no route", "silent", "silent to the leader", "silent from the leader"])
@pytest.mark.parametrize("moment", [counting, proposed, transferring, committing])
def test_who_loses_the_leader_alone_averages_with_it_again(
    how: str, moment: Callable[[Parted], None]
) -> None:
    """The link between the leader and one of two others breaks, and no side is told that the other one lives:
    by what the third one says, both find out, and it leads.
    """
    swarm = Parted(3)
    swarm.epochs(3)
    moment(swarm)
    swarm.part(how)
    swarm.averages_together()


@pytest.mark.parametrize("peers", [2, 4])
def test_a_newcomer_that_never_meets_the_leader_averages_with_it(peers: int) -> None:
    """All others reach both."""
    swarm = Parted(peers)
    swarm.epochs(3)
    swarm.join()
    swarm.run(1.0)
    for node in swarm.nodes:
        node.discarded = 0  # what the newcomer had computed before it had a state
    swarm.averages_together()


def test_who_is_named_for_a_while_and_never_heard_is_apart() -> None:
    """The first name may be older than a link that is coming up; the last one counts."""
    named = Unlinked()
    assert named.names(A, B, 10.0, 3, NO_LINK_S) == 10.0 + NO_LINK_S
    assert named.doubtful(10.5) == set()
    assert named.doubtful(11.0) == {A}  # is asked again
    assert named.apart == frozenset()
    named.names(A, B, 11.0, 3, NO_LINK_S)
    assert named.apart == {B}
    assert named.doubtful(12.0) == set()
    named.linked(B)
    assert not named


def test_whom_nobody_names_any_more_is_forgotten() -> None:
    """It may be dead: after an epoch and some seconds, or at once where a round forms without it."""
    named = Unlinked()
    for at in (0.0, 2.0):
        named.names(A, B, at, 3, NO_LINK_S)
    named.expire(2.0 + KEPT_S + 1, 4)
    assert named.apart == {B}
    named.expire(2.0 + KEPT_S + 1, 5)
    assert not named
    named.names(A, B, 20.0, 5, NO_LINK_S)
    named.keep({A})
    assert not named


def test_a_liar_names_only_so_many() -> None:
    """Names that nobody has cost bounded memory."""
    named = Unlinked()
    for number in range(2 * MOST_NAMED):
        named.names(A, number.to_bytes(20, "big"), 0.0, 0, NO_LINK_S)
        named.names(A, number.to_bytes(20, "big"), 2.0, 0, NO_LINK_S)
    assert len(named.apart) == MOST_NAMED
