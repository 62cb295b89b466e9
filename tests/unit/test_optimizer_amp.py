from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError
from tests.unit.fake_swarm import FakeSwarm
from tests.unit.test_optimizer import MAKERS, loss_of, net, relative, swarm, train_alone, wrap

__all__ = ["swarm"]  # the fixture

WAYS: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": True},
    {"delay_updates": True, "delay_warmup_epochs": 9},
]


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **({"init_scale": 8.0, "growth_interval": 1000} | options))


def microbatch(
    model: nn.Module, opt: Any, amp: torch.amp.GradScaler, ids: list[int], factor: float = 1.0
) -> None:
    amp.scale(loss_of(model, ids) * factor).backward()
    amp.step(opt)
    amp.update()
    opt.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_changing_scale_changes_nothing(swarm: FakeSwarm, way: dict[str, Any]) -> None:
    """When the scale grows inside an epoch, the average is still the one that unscaled losses give."""
    model = net()
    opt, amp = wrap(model, **way), scaler(growth_interval=2)
    scales = []
    for start in range(0, 32, 4):
        scales.append(amp.get_scale())
        microbatch(model, opt, amp, list(range(start, start + 4)))
    assert len(set(scales[:4])) > 1
    assert opt.epoch == 2
    alone = train_alone([list(range(16)), list(range(16, 32))], MAKERS["sgd"], scheduled=False)
    assert relative(model, alone) <= 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_an_infinite_microbatch_drops_the_peers_share(swarm: FakeSwarm, way: dict[str, Any]) -> None:
    """A microbatch with inf clears the sums and names the samples; the scale falls once; training goes on."""
    model = net()
    opt, amp = wrap(model, **way), scaler()
    microbatch(model, opt, amp, [0, 1, 2, 3])
    microbatch(model, opt, amp, [4, 5, 6, 7], float("inf"))
    assert swarm.discarded == [(8, "the GradScaler found inf")]
    for start in range(8, 24, 4):
        microbatch(model, opt, amp, list(range(start, start + 4)))
    assert amp.get_scale() == 4.0
    assert opt.epoch == 1
    assert relative(model, train_alone([list(range(8, 24))], MAKERS["sgd"], scheduled=False)) <= 1e-6


def test_unscaling_by_hand_is_refused(swarm: FakeSwarm) -> None:
    """scaler.unscale_(opt) would divide earlier microbatches twice: step() names max_grad_norm instead."""
    model = net()
    opt, amp = wrap(model), scaler()
    amp.scale(loss_of(model, [0, 1, 2, 3])).backward()
    amp.unscale_(opt)
    with pytest.raises(ConfigurationError, match="max_grad_norm"):
        amp.step(opt)


def test_a_disabled_scaler_is_no_scaler(swarm: FakeSwarm) -> None:
    """GradScaler(enabled=False) leaves everything as without it."""
    model = net()
    opt, amp = wrap(model), torch.amp.GradScaler("cpu", enabled=False)
    for start in range(0, 16, 4):
        microbatch(model, opt, amp, list(range(start, start + 4)))
    assert relative(model, train_alone([list(range(16))], MAKERS["sgd"], scheduled=False)) <= 1e-6
