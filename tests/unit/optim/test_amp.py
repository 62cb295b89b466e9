from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError
from p2pavg.optim.gradients.loss_scale import Clearing, Flags
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, swarm, train_alone, wrap

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


class Accelerator:
    """Work on a device: it clears sums in its own order, and the host hears of flags when `caught_up`."""

    def __init__(self) -> None:
        self._untold: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.caught_up = False

    def clear(self, clearing: Clearing, flag: torch.Tensor, slot: int) -> None:
        for buffer in clearing.sums:
            buffer.masked_fill_(flag != 0, 0.0)
        self.tell(clearing.flags.slots[slot], flag)

    def tell(self, told: torch.Tensor, flag: torch.Tensor) -> None:
        self._untold.append((told, flag.clone()))
        if self.caught_up:
            self.synchronize()

    def synchronize(self, device: torch.device | None = None) -> None:
        while self._untold:
            told, flag = self._untold.pop(0)
            told.copy_(flag)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Scaler and sums are taken to be on an accelerator, whose flags come later."""
    found = Accelerator()
    monkeypatch.setattr("p2pavg.optim.gradients.loss_scale.accelerated", lambda live, sums: True)
    monkeypatch.setattr(Clearing, "clear", lambda *arguments: found.clear(*arguments))
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_on_an_accelerator_a_changing_scale_changes_nothing(
    swarm: FakeSwarm, accelerator: Accelerator, way: dict[str, Any]
) -> None:
    """The sums follow the scale without the host knowing it."""
    test_a_changing_scale_changes_nothing(swarm, way)


@pytest.mark.parametrize("way", WAYS)
def test_on_an_accelerator_inf_is_heard_of_later(
    swarm: FakeSwarm, accelerator: Accelerator, way: dict[str, Any]
) -> None:
    """What came before inf is dropped when the host hears of it, and what came after counts."""
    model = net()
    opt, amp = wrap(model, target_batch_size=24, **way), scaler()
    microbatch(model, opt, amp, [0, 1, 2, 3])
    microbatch(model, opt, amp, [4, 5, 6, 7], float("inf"))
    microbatch(model, opt, amp, [8, 9, 10, 11])
    assert swarm.discarded == []
    accelerator.caught_up = True
    microbatch(model, opt, amp, [12, 13, 14, 15])
    assert swarm.discarded == [(8, "the GradScaler found inf")]
    for start in range(16, 32, 4):
        microbatch(model, opt, amp, list(range(start, start + 4)))
    assert amp.get_scale() == 4.0
    assert opt.epoch == 1
    assert relative(model, train_alone([list(range(8, 32))], MAKERS["sgd"], scheduled=False)) <= 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_on_an_accelerator_a_round_waits_for_the_flags(
    swarm: FakeSwarm, accelerator: Accelerator, way: dict[str, Any]
) -> None:
    """Inf in the microbatch that reaches the target is found before anything is handed in."""
    model = net()
    opt, amp = wrap(model, **way), scaler()
    for start in (0, 4, 8):
        microbatch(model, opt, amp, list(range(start, start + 4)))
    microbatch(model, opt, amp, [12, 13, 14, 15], float("inf"))
    assert swarm.discarded == [(16, "the GradScaler found inf")]
    assert opt.epoch == 0
    for start in (16, 20, 24, 28):
        microbatch(model, opt, amp, list(range(start, start + 4)))
    assert opt.epoch == 1
    assert relative(model, train_alone([list(range(16, 32))], MAKERS["sgd"], scheduled=False)) <= 1e-6


@pytest.mark.parametrize("bad", [0, 1, Flags.SLOTS, Flags.SLOTS + 9])
def test_no_inf_is_lost_when_the_device_is_far_behind(bad: int, accelerator: Accelerator) -> None:
    """More microbatches are under way than there is room for flags: one with an inf is told all the same."""
    flags, told = Flags(torch.device("cpu")), []
    for number in range(Flags.SLOTS + 10):
        accelerator.tell(flags.slots[flags.ask(counted=4 * (number + 1))], torch.tensor(float(number == bad)))
        told.append(flags.take(wait=False))
    told.append(flags.take(wait=True))
    assert [found for found in told if found is not None] == [4 * (bad + 1)]
    assert flags.take(wait=True) is None
