"""Epochs that last longer, for what rounds may cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from p2pavg.rounds.machine.actions import Action, Commit, Stretch
from p2pavg.rounds.machine.memory.config import Spaced
from p2pavg.rounds.machine.rules.pace import Pace
from p2pavg.rounds.machine.rules.spacing import Spacing, Spent
from p2pavg.rounds.protocol.messages import Totals
from p2pavg.rounds.protocol.roles import PlanMember, Role
from tests.simulation.calm import Calm
from tests.simulation.trainer import Node

EPOCHS = 5


def apart(seconds: float) -> Spacing:
    """Rounds for a cent each."""
    return Spacing(0.01, 36 / seconds)


def paid(peers: int, seconds: float) -> Spaced:
    """A round of so many peers costs a cent, and one of fewer less: nothing, for a peer alone."""

    def spacing(members: Sequence[PlanMember]) -> Spacing:
        share = (len(members) - 1) / max(1, peers - 1) if peers > 1 else 1.0
        return Spacing(0.01 * share, 36 / seconds)

    return spacing


def proposed(calm: Calm) -> list[float]:
    return [calm.times("proposed", epoch)[0] for epoch in range(EPOCHS)]


@pytest.mark.parametrize(
    ("peers", "latency", "step", "slow"),
    [(3, 0.002, 0.05, 1.0), (4, 0.15, 0.02, 1.0), (4, 0.002, 0.3, 3.0), (1, 0.002, 0.05, 1.0)],
)
def test_rounds_are_as_far_apart_as_they_may_cost(
    peers: int, latency: float, step: float, slow: float
) -> None:
    """The training threads compute on meanwhile: an epoch counts what they do in that time."""
    calm = Calm(peers, latency=latency, step=step, slow=slow, spacing=paid(peers, 8.0))
    calm.epochs(EPOCHS, limit=100.0)
    times = proposed(calm)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(8.0 <= gap <= 8.0 + 2 * step * slow + 10 * latency for gap in gaps), gaps
    most = 8.0 / step * 4 * (peers - 1 + 1 / slow)
    counted = [made.samples for made in calm.nodes[0].machine.history[1:EPOCHS]]
    assert all(0.75 * most <= samples <= 1.1 * most for samples in counted), (most, counted)


def test_rounds_that_come_more_rarely_anyway_are_left_alone() -> None:
    """Nothing is told to people, and no report says that an epoch was stretched."""
    calm = Calm(3, step=0.05, spacing=lambda members: apart(0.2))
    calm.epochs(EPOCHS)
    assert not [trace for _, _, trace in calm.traced if trace.kind == "stretched"]


def test_it_is_told_once_and_reported_each_time() -> None:
    """The leader says in one line what a round costs; its traces say by how much each epoch was longer."""
    calm = Calm(3, step=0.05, spacing=lambda members: apart(4.0))
    said: list[Stretch] = []
    acted = calm.swarm.acted

    def heard(node: Node, action: Action) -> None:
        acted(node, action)
        if isinstance(action, Stretch):
            said.append(action)

    calm.swarm.acted = heard  # type: ignore[method-assign]
    calm.epochs(EPOCHS)
    assert said == [Stretch(apart(4.0))]
    longer = [trace.fields["seconds"] for _, _, trace in calm.traced if trace.kind == "stretched"]
    assert len(longer) == EPOCHS - 1
    assert all(3.0 < seconds < 4.0 for seconds in longer)


def test_another_leader_keeps_to_it() -> None:
    """Who leads after a leader's death knows when the last round was."""
    calm = Calm(4, step=0.05, spacing=lambda members: apart(5.0))
    calm.epochs(2)
    calm.run(1.0)
    calm.leader.die("crash")
    calm.epochs(4, limit=60.0)
    times = [calm.times("proposed", epoch)[0] for epoch in range(4)]
    assert all(later - earlier >= 5.0 for earlier, later in pairwise(times)), times


def test_newcomers_compute_on_with_the_others() -> None:
    """Who came by a state believes the leader as well: it contributes as much as they do."""
    calm = Calm(3, step=0.05, spacing=paid(4, 5.0))
    calm.epochs(2)
    newcomer = calm.swarm.add(Role.JOINER, 0.05, 4)
    calm.nodes.append(newcomer)
    shares: list[int] = []
    acted = calm.swarm.acted

    def heard(node: Node, action: Action) -> None:
        acted(node, action)
        if isinstance(action, Commit) and node is newcomer:
            rank = [seat.peer for seat in action.members].index(node.me)
            shares.append(action.samples[rank])

    calm.swarm.acted = heard  # type: ignore[method-assign]
    calm.epochs(6, limit=60.0)
    assert all(samples > 0.75 * 4 * 5.0 / 0.05 for samples in shares[1:]), shares
    assert len(shares) > 2


def test_failed_attempts_count_as_rounds() -> None:
    """A round that took three attempts sent three times as much: the next one comes the later."""
    spent = Spent(100.0, 3)
    assert spent.next_round(Spacing(0.5, 60.0)) == 100.0 + 3 * 30.0


def test_a_leader_that_lets_nobody_stop_is_not_believed_for_ever() -> None:
    """Without a limit of its own a peer believes in no negative count, and with one for a bounded time."""

    def seen(calm: Calm) -> list[int | None]:
        calm.epochs(2)
        node = next(n for n in calm.nodes if n is not calm.leader)
        machine = node.machine
        found = []
        for seconds in (0.0, 50.0):
            machine.core.live(machine.core.now + seconds)
            machine.counting.on_totals(calm.leader.me, Totals(machine.epoch, machine.lineage, -1000))
            found.append(machine.core.own.waits_at)
        return found

    def spacing(members: Sequence[PlanMember]) -> Spacing:
        return apart(10.0)

    assert seen(Calm(3, step=0.05)) == [0, 0]
    assert seen(Calm(3, step=0.05, spacing=spacing)) == [-1000, 0]


def test_what_a_thread_will_count_is_known_from_its_pace() -> None:
    """Whole steps alone; nothing is known of a pace that nobody measured."""
    assert Pace(0.5, 8, 10.0).coming(12.2, 10.0) == 4 * 8
    assert Pace(0.5, 8, 10.0).coming(9.0, 10.0) == 0
    assert Pace().coming(12.0, 10.0) == 0
