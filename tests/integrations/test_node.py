"""Two ranks that train together are one peer of the swarm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.integrations import outer_nodes
from tests.integrations.nodes import STEPS, batch, loss_of, net, train
from tests.integrations.processes import bits, run
from tests.ports import free_port

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_a_node_and_a_single_peer_are_three_peers(kind: str) -> None:
    """Two ranks and a single peer end with equal bits, and as one process with all their batches."""
    ends = run(train, 3, kind, free_port(), None)
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])
    model = net()
    model[1].eval()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for at in range(STEPS):
        inner.zero_grad()
        loss_of(model, torch.cat([batch(member, at) for member in range(3)])).backward()
        inner.step()
    np.testing.assert_allclose(ends[0], bits(model), rtol=1e-5, atol=1e-6)


def test_a_node_with_delayed_updates_ends_with_the_bits_of_a_single_peer() -> None:
    """The first rank steps behind the next epoch's computation: all ranks and a single peer end equal."""
    ends = run(train, 3, "delayed", free_port(), None)
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])
    assert not np.array_equal(ends[0], bits(net()))


def test_a_rank_that_dies_is_the_node_that_leaves() -> None:
    """One rank is killed: the other one's step() raises, and the swarm's other peer goes on alone."""
    ends = run(train, 3, "ddp", free_port(), 2, lost={1})
    assert len(ends[0]) == 0
    assert len(ends[2]) > 0


def outer_steps(members: int) -> tuple[np.ndarray, np.ndarray, float]:
    """ALONE outer steps of one process with the batches of so many: parameters, momenta, learning rate."""
    model = net()
    model[1].eval()
    inner = torch.optim.SGD(model.parameters(), lr=outer_nodes.LR, momentum=0.9)
    schedule = outer_nodes.schedule(inner)
    theta, velocity, settings = bits(model), np.zeros_like(bits(model)), outer_nodes.OUTER
    for at in range(outer_nodes.ALONE * outer_nodes.LOCAL):
        loss_of(model, torch.cat([batch(member, at) for member in range(members)])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), outer_nodes.NORM)
        inner.step()
        schedule.step()
        inner.zero_grad()
        if at % outer_nodes.LOCAL == outer_nodes.LOCAL - 1:
            moved = theta - bits(model)
            velocity = settings.momentum * velocity + moved
            theta = theta - settings.lr * (moved + settings.momentum * velocity)
            torch.nn.utils.vector_to_parameters(
                torch.from_numpy(theta.astype(np.float32)), model.parameters()
            )
    momenta = [inner.state[param]["momentum_buffer"] for param in model.parameters()]
    return bits(model), outer_nodes.whole(momenta), inner.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("kind", "single_first"),
    [
        ("fsdp", False),
        pytest.param("ddp", True, marks=pytest.mark.long),
        pytest.param("ddp", False, marks=pytest.mark.long),
        pytest.param("fsdp", True, marks=pytest.mark.long),
    ],
)
def test_a_node_moves_between_outer_steps_as_one_process(kind: str, single_first: bool) -> None:
    """Its ranks step their own parameters or shards, clipped and by the schedule, as one process with all of
    their batches. Whoever comes later, single peer or node, gets momenta and learning rate on all ranks, and
    all end with equal bits.
    """
    ends = run(outer_nodes.train, 3, kind, free_port(), single_first)
    theta, momenta, rate = outer_steps(1 if single_first else 2)
    first = ends[:1] if single_first else ends[:2]
    for end in first:
        np.testing.assert_allclose(end.alone, theta, rtol=1e-4, atol=1e-6)
    for end in ends:
        np.testing.assert_allclose(end.momenta, momenta, rtol=1e-4, atol=1e-6)
        assert end.rate == pytest.approx(rate)
        assert end.epoch == ends[0].epoch
        assert np.array_equal(end.theta, ends[0].theta)
    assert not np.array_equal(ends[0].theta, ends[0].alone)
