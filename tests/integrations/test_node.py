"""Two ranks that train together are one peer of the swarm."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch

from tests.integrations.nodes import STEPS, batch, loss_of, net, train
from tests.integrations.processes import bits, run

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
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
