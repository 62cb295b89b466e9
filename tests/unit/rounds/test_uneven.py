"""Peers of unlike speed, and a run of two whose only trained peer dies: what outer steps depend on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from p2pavg.rounds.machine import actions as act
from p2pavg.rounds.protocol.roles import Role
from tests.simulation.calm import Calm
from tests.simulation.swarm import Swarm

EPOCHS = 8
KNOWN_S = 1.0  # after so long a newcomer has its state, and takes part
LIMIT_S = 300.0  # virtual seconds


@dataclass(frozen=True)
class Commit:
    """What a member committed."""

    at: float
    epoch: int
    members: int
    contributors: int


def recorded(swarm: Swarm) -> list[Commit]:
    """All commits of a swarm, from now on."""
    found: list[Commit] = []
    acted = swarm.acted

    def record(node: Any, action: Any) -> None:
        acted(node, action)
        if isinstance(action, act.Commit):
            shares = sum(weight > 0 for weight in action.weights)
            found.append(Commit(swarm.world.now, action.ballot.epoch, len(action.members), shares))

    swarm.acted = record  # type: ignore[method-assign]
    return found


def uneven(seed: int) -> None:
    """One schedule: two to five peers, one of them four times slower than another; perhaps one comes later.

    Nobody commits alone, with a slow peer a member of weight 0 or missing, once others are there.
    """
    dice = random.Random(f"uneven {seed}")
    paces = [1.0, 4.0] + [dice.choice((1.0, 2.0, 4.0)) for _ in range(dice.choice((0, 0, 0, 1, 2)))]
    dice.shuffle(paces)
    step, steps = dice.choice((0.01, 0.03, 0.1)), dice.choice((5, 10, 30))
    swarm = Swarm(
        seed,
        latency=min(dice.choice((0.0002, 0.02, 0.05, 0.15)), step * steps / 5),
        chunk_seconds=min(dice.choice((0.0, 0.001, 0.05)), step * steps / 8) / len(paces),
        target=int(4 * steps * sum(1 / pace for pace in paces)),
        state_seconds=0.05,
        beat=0.1,
    )
    commits = recorded(swarm)
    nodes = [swarm.add(Role.TRAINER, step * pace, 4) for pace in paces]
    later = step * steps * dice.choice((1.5, 3.0)) if dice.random() < 0.3 else None
    if later is not None:
        swarm.world.after(later, lambda: nodes.append(swarm.add(Role.JOINER, step * dice.choice((1, 4)), 4)))
    swarm.world.run(LIMIT_S, lambda: all(node.parameters.epoch >= EPOCHS for node in nodes))
    assert all(node.parameters.epoch >= EPOCHS for node in nodes), seed
    for commit in commits:
        wanted = len(paces)
        if later is not None and commit.at > later + KNOWN_S + step * steps:
            wanted += 1
        assert commit.members >= wanted, (seed, commit)
        assert commit.contributors > 1, (seed, commit)


def test_the_faster_never_commits_alone() -> None:
    """Peers that are four times slower than others are in every average, whatever the latency and the
    epoch.
    """
    for seed in range(40):
        uneven(seed)


@pytest.mark.long
def test_the_faster_never_commits_alone_in_a_thousand_schedules() -> None:
    """The same, a thousand times."""
    for seed in range(1000):
        uneven(seed)


@pytest.mark.parametrize("seed", range(50))
def test_a_run_never_goes_back_when_its_only_trained_peer_dies(seed: int) -> None:
    """It is killed at some moment while the only other peer downloads its state, or just after. Without the
    state the newcomer begins no run of its own: it waits. The killed one comes back with its checkpoint, and
    both go on from there; or from the state, where the newcomer has it.
    """
    dice = random.Random(f"alone {seed}")
    download = dice.choice((0.5, 2.0))
    swarm = Swarm(seed, latency=0.02, chunk_seconds=0.0, target=80, state_seconds=download, beat=0.1)
    commits = recorded(swarm)
    first = swarm.add(Role.TRAINER, 0.03, 4)
    swarm.world.run(LIMIT_S, lambda: first.parameters.epoch >= 4)
    newcomer = swarm.add(Role.JOINER, 0.03, 4)
    swarm.world.run(swarm.world.now + 1.5 * download * dice.random(), lambda: False)
    saved = first.saved
    held = newcomer.parameters if newcomer.parameters.epoch > 0 else None
    first.die("connection reset")
    died_at = swarm.world.now
    swarm.world.run(died_at + dice.choice((0.1, 1.0, 8.0)), lambda: False)
    assert held or not [commit for commit in commits if commit.at > died_at]
    back = swarm.restart(first, saved)
    goal = max(saved.epoch, newcomer.machine.epoch) + 3
    both = (back, newcomer)
    swarm.world.run(swarm.world.now + LIMIT_S, lambda: all(one.parameters.epoch >= goal for one in both))
    assert all(one.parameters.epoch >= goal for one in both)
    assert not swarm.checks.strays(list(both))
    least = held or saved
    assert least.lineage in swarm.checks.chain(list(both))
    assert all(commit.epoch >= least.epoch for commit in commits if commit.at > died_at)


def test_what_a_killed_peer_had_told_of_is_known() -> None:
    """The others learn, with the end of its link, how many of its samples are in no average."""
    calm = Calm(3)
    calm.epochs(2)
    victim = next(node for node in calm.nodes if node is not calm.leader)
    calm.run(
        5.0, lambda: victim.parameters.epoch == calm.leader.parameters.epoch and len(victim.samples) > 20
    )
    leader, had = calm.leader, len(victim.samples)
    victim.die("connection reset")
    calm.run(0.1)
    told = [trace.fields for _, node, trace in calm.traced if trace.kind == "down" and node is leader]
    assert [fields["peer"] for fields in told] == [victim.me]
    assert told[0]["epoch"] == leader.machine.epoch
    assert had - 2 * 4 <= told[0]["samples"] <= had
