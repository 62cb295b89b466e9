"""The block of `averaged()`: the model holds θ_ref in it, whatever else is done there."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.outer.test_outer_steps import net, swarm, train, vector, wrap

__all__ = ["swarm"]


def moved(opt: CollaborativeOptimizer) -> np.ndarray:
    """Δ as it would be handed in now."""
    found = np.zeros(opt._reference.fragments.total, np.float32)
    opt._reference.displacement(found)
    return found


def theta(opt: CollaborativeOptimizer) -> torch.Tensor:
    return torch.cat([view.flatten().clone() for view in opt._reference.views(opt._reference.theta)])


@pytest.mark.parametrize("swapped", [False, True])
def test_a_state_is_saved_in_the_block_while_a_round_runs(swarm: FakeSwarm, swapped: bool) -> None:
    """With overlap the round is waited for first: state_dict() in the block moves no parameters, and what is
    averaged already is not handed in again after it.
    """
    model = net()
    opt = wrap(model, outer=Outer(overlap=3))
    train(model, opt, range(4))
    assert opt._update._job is not None  # type: ignore[attr-defined]
    with opt.swapped() if swapped else opt.averaged():
        before = vector(model)
        state = opt.state_dict()
        assert torch.equal(vector(model), before)
    assert opt.epoch == state["p2pavg"]["epoch"] == 1
    assert torch.equal(before, theta(opt))
    assert not moved(opt).any()
    opt.close(0)


def test_blocks_may_be_nested(swarm: FakeSwarm) -> None:
    """The inner one changes nothing: what this peer moved is there after both, and in a state saved there."""
    model = net()
    opt = wrap(model, outer=Outer(density=1 / 16), compression="fp16")
    train(model, opt, range(3))
    own, rest = vector(model), moved(opt)
    with opt.averaged():
        with opt.averaged():
            assert torch.equal(vector(model), theta(opt))
        assert torch.equal(vector(model), theta(opt))
        assert np.array_equal(moved(opt), rest)
        saved = opt.state_dict()["p2pavg"]["extras"]["p2pavg.outer"]
    assert torch.equal(vector(model), own)
    assert np.array_equal(saved["moves not sent"].numpy(), rest)
    opt.close(0)


@pytest.mark.parametrize("what", ["discard", "close", "load_state_dict"])
def test_moves_that_are_given_up_in_the_block_do_not_come_back(swarm: FakeSwarm, what: str) -> None:
    """discard(), close() and load_state_dict() in the block leave the model with the swarm's parameters."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(4))
    held = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train(model, opt, range(4, 10))
    with opt.averaged():
        if what == "discard":
            opt.discard()
        elif what == "close":
            opt.close(0)
        else:
            model.load_state_dict(held[0])
            opt.load_state_dict(held[1])
    assert torch.equal(vector(model), theta(opt))
    opt.close(0)


def test_a_peer_that_leaves_in_the_block_hands_over_what_it_moved(swarm: FakeSwarm) -> None:
    """What is handed in comes from θ_local, though the model shows θ_ref."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(3))
    rest = moved(opt)
    with opt.averaged():
        contribution = opt._update._contribution(opt._update._keep())  # type: ignore[attr-defined]
    assert contribution.samples == 12
    assert isinstance(contribution.gradient, np.ndarray)
    assert np.array_equal(contribution.gradient[: len(rest)], rest)
    assert rest.any()
    opt.close(0)


def test_step_in_the_block_is_refused(swarm: FakeSwarm) -> None:
    """The sentence names both blocks."""
    opt = wrap(net())
    with opt.averaged(), pytest.raises(ConfigurationError, match=r"opt\.averaged\(\): end the block"):
        opt.step()
    opt.close(0)
