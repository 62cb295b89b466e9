"""States that another run's outer steps saved, or that are broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.optim.outer.settings import Outer
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.outer.test_outer_steps import net, swarm, train, vector, wrap

__all__ = ["swarm"]
Part = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "broken",
    [
        lambda part: [1, 2],
        lambda part: {name: torch.tensor(1.0) for name in part},
        lambda part: {name: vector[:, None] for name, vector in part.items()},
        lambda part: {name: vector.half() for name, vector in part.items()},
        lambda part: {name: vector.to("meta") for name, vector in part.items()},
        lambda part: {name: vector[:-1] for name, vector in part.items()},
        lambda part: {"velocity": part["velocity"]},
    ],
    ids=["list", "number", "column", "half", "meta", "short", "half of it"],
)
def test_a_broken_part_is_refused_and_nothing_is_lost(
    swarm: FakeSwarm, broken: Callable[[Part], Any]
) -> None:
    """One sentence; θ_ref and velocity are again what the run has, and training goes on from there."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(8))
    state = opt.state_dict()
    train(model, opt, range(8, 12))
    theta, velocity = opt._reference.theta.copy(), opt._reference.velocity.copy()
    extras = state["p2pavg"]["extras"]
    extras["p2pavg.outer"] = broken(extras["p2pavg.outer"])
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)  # of a checkpoint that the user loads first
    with pytest.raises(StateError, match="outer steps; build it as it was saved"):
        opt.load_state_dict(state)
    assert np.array_equal(opt._reference.theta, theta)
    assert np.array_equal(opt._reference.velocity, velocity)
    assert torch.equal(vector(model), torch.cat([v.flatten() for v in opt._reference.views(theta)]))
    opt.step()
    assert opt.epoch == 3
    opt.close(0)


def test_a_part_that_needs_gradients_is_taken(swarm: FakeSwarm) -> None:
    """Tensors of a state may be as somebody's code left them."""
    model = net()
    opt = wrap(model)
    train(model, opt, range(8))
    state = opt.state_dict()
    for tensor in state["p2pavg"]["extras"]["p2pavg.outer"].values():
        tensor.requires_grad_()
    train(model, opt, range(8, 12))
    theta = state["p2pavg"]["extras"]["p2pavg.outer"]["reference"].detach().numpy()
    opt.load_state_dict(state)
    assert np.array_equal(opt._reference.theta, theta)
    opt.close(0)


@pytest.mark.parametrize(
    "numbers", [{"lr": 1e39}, {"lr": 10**400}, {"lr": 1e-60}, {"momentum": 1 - 1e-12}], ids=str
)
def test_numbers_are_as_steps_have_them(numbers: dict[str, float]) -> None:
    """What float32 rounds to 0, 1 or infinity is refused: outer steps are in float32."""
    with pytest.raises(ConfigurationError, match="cannot be"):
        Outer(**numbers)
