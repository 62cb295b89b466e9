"""What int4 rounds away of outer steps: with feedback it arrives, without it never does."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer, Outer
from p2pavg.allreduce.feedback import Residual
from tests.swarm.test_one_process import together

pytestmark = pytest.mark.swarm

AVERAGES = 30
DEADLINE_S = 100.0
VALUES = 3000
EACH = 500  # one value of so many moves on for ever, and sets the levels of its block
PULL = 0.06  # of the others, towards their targets, beside it: less than half a level of int4, which is 1/14


def loss_left(run_id: str) -> float:
    """The share of a quadratic loss that is left after two peers' outer steps in int4, at θ_ref."""
    targets = torch.linspace(-1, 1, VALUES)
    weights = [nn.Parameter(torch.zeros(VALUES)) for _ in range(2)]
    opts: list[CollaborativeOptimizer] = []
    for weight in weights:
        opts.append(
            CollaborativeOptimizer(
                torch.optim.SGD([weight], lr=0.25),
                run_id,
                32,
                4,
                initial_peers=[opts[0].peer.address] if opts else [],
                compression="int4",
                outer=Outer(lr=1.0, momentum=0.0),
                listen="127.0.0.1:0",
            )
        )

    def train(rank: int) -> None:
        weight, opt = weights[rank], opts[rank]
        until = time.monotonic() + DEADLINE_S
        while opt.epoch < AVERAGES and time.monotonic() < until:
            gradient = PULL * (weight.detach() - targets)
            gradient[::EACH] = -1.0
            weight.grad = gradient
            opt.step()
            time.sleep(0.002)
        assert opt.epoch == AVERAGES

    together([lambda rank=rank: train(rank) for rank in range(2)])
    for opt in opts:
        opt.close(0.0)
    assert torch.equal(*weights)
    off = weights[0].detach() - targets
    off[::EACH], targets[::EACH] = 0, 0
    return float(off.square().sum() / targets.square().sum())


@pytest.mark.timeout(240)
def test_int4_needs_its_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a value that moves on in each block, all others move by less than half a level: thirty averages
    take the loss to a seventh and less, and without feedback nothing of it goes.
    """
    assert loss_left("int4 with feedback") < 1 / 7
    monkeypatch.setattr(Residual, "commit", lambda residual: None)
    assert loss_left("int4 without feedback") > 0.99
