"""Leaving the run on purpose, under a virtual clock."""

from __future__ import annotations

import pytest

from tests.simulation.calm import Calm
from tests.simulation.trainer import Node


def total(calm: Calm, node: Node) -> int:
    """Samples of this node that count in the lineage that the others end in."""
    best = max((n for n in calm.nodes if n.alive), key=lambda n: n.machine.epoch)
    final = calm.swarm.checks.counted[best.machine.lineage]
    return sum(1 for peer, _ in final if peer == node.me)


@pytest.mark.parametrize("moment", [0.0, 0.03, 0.11, 0.2, 0.205, 0.21])
@pytest.mark.parametrize("who", ["leader", "member"])
def test_who_leaves_loses_no_sample(who: str, moment: float) -> None:
    """Whenever a peer leaves, all that it ever counted is in the averages of those that stay."""
    calm = Calm(3, chunk_seconds=0.002)
    calm.epochs(2)
    calm.run(moment)
    leader = calm.leader
    leaver = leader if who == "leader" else next(node for node in calm.nodes if node is not leader)
    leaver.leave()
    calm.run(10.0, lambda: not leaver.alive)
    assert not leaver.alive
    assert leaver.discarded == 0
    calm.epochs(max(node.machine.epoch for node in calm.nodes) + 3)
    assert leaver.produced > 0
    assert total(calm, leaver) == leaver.produced


def test_the_last_peer_names_what_it_loses() -> None:
    """Nobody is left to count the samples: they are named as discarded, and the peer goes at once."""
    calm = Calm(1)
    calm.epochs(2)
    calm.run(0.05)
    (alone,) = calm.nodes
    before = calm.swarm.world.now
    alone.leave()
    calm.run(10.0, lambda: not alone.alive)
    assert calm.swarm.world.now - before < 0.1
    assert alone.discarded == len(alone.samples) > 0


def test_a_dead_heir_is_passed_over() -> None:
    """The nearest heir is gone when it is asked: the next one takes the samples."""
    calm = Calm(3)
    calm.epochs(2)
    leaver, *others = calm.nodes
    calm.run(0.05)
    nearest, other = sorted(others, key=lambda node: node.me)
    nearest.stop()
    leaver.leave()
    calm.run(10.0, lambda: not leaver.alive)
    assert leaver.discarded == 0
    assert not nearest.heir_of
    assert other.heir_of
