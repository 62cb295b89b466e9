"""The optimizer with a model on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pavg.optim.gradients.flat import FlatGradients
from p2pavg.optim.optimizer import CollaborativeOptimizer
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, net, sample, swarm

__all__ = ["swarm"]  # the fixture

pytestmark = pytest.mark.gpu

WAYS: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": True},
    {"delay_updates": True, "delay_warmup_epochs": 99},
    {"delay_updates": True, "offload_optimizer": True, "delay_warmup_epochs": 99},
]


def loss_of(model: nn.Module, ids: list[int]) -> torch.Tensor:
    x = sample(ids).cuda().to(next(model.parameters()).dtype)
    return model(x).float().square().sum(dim=1).mean()


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def relative(a: nn.Module, b: nn.Module) -> float:
    return float((vector(a) - vector(b)).norm() / vector(b).norm())


def alone(epochs: int, name: str) -> nn.Module:
    model = net().cuda()
    optimizer = MAKERS[name](model.parameters())
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss_of(model, list(range(8 * epoch, 8 * epoch + 8))).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("way", WAYS)
def test_capturable_optimizers(swarm: FakeSwarm, way: dict[str, Any]) -> None:
    """capturable=True, with step counters on the device, steps on averaged gradients like any other."""
    model, twin = net().cuda(), net().cuda()
    with CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True),
        "test",
        8,
        8,
        compression="none",
        **way,
    ) as opt:
        for epoch in range(3):
            loss_of(model, [8 * epoch + i for i in range(8)]).backward()
            opt.step()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, capturable=True)
    for epoch in range(3):
        optimizer.zero_grad()
        loss_of(twin, [8 * epoch + i for i in range(8)]).backward()
        optimizer.step()
    assert relative(model, twin) <= 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKERS)
def test_training_on_the_device_is_that_of_one_process(
    swarm: FakeSwarm, name: str, way: dict[str, Any]
) -> None:
    """Every way of updating gives the parameters that plain PyTorch on the device gives."""
    model = net().cuda()
    with CollaborativeOptimizer(
        MAKERS[name](model.parameters()), "test", 8, 4, compression="none", **way
    ) as opt:
        for epoch in range(4):
            for half in (0, 4):
                loss_of(model, [8 * epoch + half + i for i in range(4)]).backward()
                opt.step()
                opt.zero_grad()
        assert opt.epoch == 4
    assert all(p.is_cuda for p in model.parameters())
    assert relative(model, alone(4, name)) <= 1e-5


def test_delayed_updates_settle_to_what_was_averaged(swarm: FakeSwarm) -> None:
    """With delay two gradients see the initial parameters, and close() applies what is under way."""
    model = net().cuda()
    opt = CollaborativeOptimizer(
        MAKERS["sgd"](model.parameters()),
        "test",
        4,
        4,
        compression="none",
        delay_updates=True,
        delay_warmup_epochs=0,
        offload_optimizer=True,
    )
    start = net().cuda()
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        loss_of(model, ids).backward()
        opt.step()
    opt.close()
    twin = net().cuda()
    optimizer = MAKERS["sgd"](twin.parameters())
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        grads = torch.autograd.grad(loss_of(start, ids), list(start.parameters()))
        for param, grad in zip(twin.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    assert relative(model, twin) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_accumulate_in_float32(dtype: torch.dtype) -> None:
    """grad_dtype=float32 on the device: a thousand small gradients add up."""
    param = nn.Parameter(torch.ones(64, dtype=dtype, device="cuda"))
    flat = FlatGradients([param], torch.float32)
    for _ in range(1000):
        (param * 0.25).sum().backward()
        flat.tick()
    total = flat.total(1.0)
    assert total is not None
    assert total[:64].tolist() == [250.0] * 64


@pytest.mark.parametrize("way", WAYS)
def test_autocast_and_grad_scaler(swarm: FakeSwarm, way: dict[str, Any]) -> None:
    """float16 autocast with a GradScaler trains; a microbatch with inf drops this peer's share."""
    model = net().cuda()
    amp = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
    with CollaborativeOptimizer(
        MAKERS["adamw"](model.parameters()), "test", 8, 4, compression="none", **way
    ) as opt:
        for step in range(12):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_of(model, [4 * step + i for i in range(4)])
            amp.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
            amp.step(opt)
            amp.update()
            opt.zero_grad()
        assert opt.epoch == 5
    assert swarm.discarded == [(8, "the GradScaler found inf")]
    assert torch.isfinite(vector(model)).all()


def test_a_model_may_move_to_the_device_after_wrapping(swarm: FakeSwarm) -> None:
    """model.cuda() after the optimizer was built: the sums follow."""
    model = net()
    opt = CollaborativeOptimizer(MAKERS["sgd"](model.parameters()), "test", 8, 4, compression="none")
    model.cuda()
    for half in (0, 4):
        loss_of(model, [half + i for i in range(4)]).backward()
        opt.step()
    assert opt.epoch == 1
    assert relative(model, alone(1, "sgd")) <= 1e-5


def test_step_before_the_target_allocates_nothing(swarm: FakeSwarm) -> None:
    """Below the target step() leaves the device's memory and streams alone."""
    model = net().cuda()
    opt = CollaborativeOptimizer(MAKERS["sgd"](model.parameters()), "test", 10**6, 4, compression="none")
    for _ in range(3):
        loss_of(model, [0, 1, 2, 3]).backward()
        opt.step()
    loss_of(model, [0, 1, 2, 3]).backward()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    opt.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
