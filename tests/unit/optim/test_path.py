"""The optimizer where gradients stay on an accelerator, which here is the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg.optim.gradients.vectors import DEVICE_STEP, all_finite, clip_norm
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.rounds.training import KeepGoing
from tests.unit.optim.fake_path import FakePath
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, swarm, train_alone, vector

__all__ = ["swarm"]  # the fixture

WAYS: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": True},
    {"delay_updates": True, "delay_warmup_epochs": 99},
    {"delay_updates": True, "offload_optimizer": True, "delay_warmup_epochs": 99},
]
each_way = pytest.mark.parametrize("way", WAYS, ids=["waiting", "offload", "delayed", "both"])


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> FakePath:
    fake = FakePath()
    monkeypatch.setattr("p2pavg.optim.optimizer.open_cuda_path", lambda compression: lambda *place: fake)
    return fake


def train(epochs: int, name: str = "sgd", compression: str = "none", **options: Any) -> nn.Module:
    model = net()
    with CollaborativeOptimizer(
        MAKERS[name](model.parameters()), "test", 8, 4, compression=compression, **options
    ) as opt:
        for epoch in range(epochs):
            for half in (0, 4):
                loss_of(model, [8 * epoch + half + i for i in range(4)]).backward()
                opt.step()
                opt.zero_grad()
        assert opt.epoch == epochs
    return model


@each_way
@pytest.mark.parametrize("name", MAKERS)
def test_training_is_that_of_one_process(
    swarm: FakeSwarm, path: FakePath, name: str, way: dict[str, Any]
) -> None:
    """Every way of updating gives what one process gives, and decodes where the masters are."""
    model = train(4, name, **way)
    alone = train_alone([list(range(8 * e, 8 * e + 8)) for e in range(4)], MAKERS[name], scheduled=False)
    assert relative(model, alone) <= 1e-6
    assert path.decoded == (0 if way.get("offload_optimizer") else 4)
    assert bool(path.asides) == bool(way)


@each_way
def test_clipping_takes_the_same_factor(swarm: FakeSwarm, path: FakePath, way: dict[str, Any]) -> None:
    """max_grad_norm on the accelerator clips as it does on the CPU."""
    here = train(3, max_grad_norm=0.01, **way)
    path.decoded = -100
    swarm.joined.clear()
    swarm.rounds = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pavg.optim.optimizer.open_cuda_path", lambda compression: lambda *place: None)
        there = train(3, max_grad_norm=0.01, **way)
    assert path.decoded == -100
    assert torch.equal(vector(here), vector(there))


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
def test_codecs_run_there(swarm: FakeSwarm, path: FakePath, codec: str) -> None:
    """A lossy contribution trains to nearly the same parameters."""
    exact = train_alone([list(range(8 * e, 8 * e + 8)) for e in range(3)], MAKERS["sgd"], scheduled=False)
    assert 0 < relative(train(3, compression=codec), exact) <= (3e-2 if codec == "int4" else 1e-2)


@each_way
def test_non_finite_sums_stay_here(swarm: FakeSwarm, path: FakePath, way: dict[str, Any]) -> None:
    """A NaN in the sums drops this peer's share of the epoch, which is named."""
    model = net()
    with CollaborativeOptimizer(
        MAKERS["sgd"](model.parameters()), "test", 8, 4, compression="none", **way
    ) as opt:
        for step in range(6):
            loss = loss_of(model, [4 * step + i for i in range(4)])
            (loss * (float("nan") if step == 2 else 1.0)).backward()
            opt.step()
    assert swarm.discarded == [(8, "non-finite gradient")]
    assert torch.isfinite(vector(model)).all()


def test_a_late_average_leaves_the_sums(swarm: FakeSwarm, path: FakePath) -> None:
    """An average without this peer's samples is applied from other memory, and the sums count later."""
    swarm.members = 2
    model = net()
    opt = CollaborativeOptimizer(MAKERS["sgd"](model.parameters()), "test", 8, 4, compression="none")
    swarm.joined.append(_silent(swarm, opt))
    loss_of(model, [0, 1, 2, 3]).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    swarm.joined[0].outcomes.append(_late_average(opt))
    opt.step()
    assert opt.epoch == 1
    after = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _silent(swarm: FakeSwarm, opt: CollaborativeOptimizer) -> Any:
    from tests.unit.optim.fake_swarm import FakeTraining

    return FakeTraining(swarm, swarm.joined[0].spec, 1)


def _late_average(opt: CollaborativeOptimizer) -> Any:
    from p2pavg.rounds.training import Average
    from tests.unit.optim.fake_swarm import encoded

    numel = opt._flat.layout.numel
    return Average(0, 4, 2, True, encoded(np.zeros(numel, np.float32), "none"), b"")


def test_sums_come_back_when_nothing_was_averaged(swarm: FakeSwarm, path: FakePath) -> None:
    """Delayed sums that no round took are added to those that accumulated meanwhile."""
    model = net()
    opt = CollaborativeOptimizer(
        MAKERS["sgd"](model.parameters()),
        "test",
        8,
        4,
        compression="none",
        delay_updates=True,
        delay_warmup_epochs=0,
    )
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    swarm.joined[0].outcomes.append(KeepGoing())
    loss_of(model, [4, 5, 6, 7]).backward()
    opt.step()
    opt._update.settle()
    expected = torch.autograd.grad(loss_of(model, list(range(8))), list(model.parameters()))
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad / 2, grad)
    opt.close()


def test_unused_parameters_rest(swarm: FakeSwarm, path: FakePath) -> None:
    """A parameter that no backward reached has no gradient in the step, momentum and decay included."""
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)})
    before = vector(model["unused"]).clone()
    opt = CollaborativeOptimizer(MAKERS["adamw"](model.parameters()), "test", 4, 4, compression="fp16")
    loss_of(model["used"], [0, 1, 2, 3]).backward()
    opt.step()
    assert opt.epoch == 1
    assert torch.equal(vector(model["unused"]), before)


def test_batchnorm_statistics_travel(swarm: FakeSwarm, path: FakePath) -> None:
    """Buffers come back from the accelerator with the average."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with CollaborativeOptimizer(
        MAKERS["sgd"](model.parameters()), "test", 4, 4, compression="none", delay_updates=True
    ) as opt:
        for step in range(3):
            loss_of(model, [4 * step + i for i in range(4)]).backward()
            opt.step()
        agreed = opt._buffers.agreed()
    assert all(torch.allclose(live, there) for live, there in zip(model.buffers(), agreed, strict=True))


def test_half_parameters_with_float32_sums_stay_there(swarm: FakeSwarm, path: FakePath) -> None:
    """grad_dtype=float32 under bfloat16 parameters uses the path; bfloat16 sums go through the host."""
    for grad_dtype, decoded in ((torch.float32, 1), (None, 1)):
        model = net().bfloat16()
        opt = CollaborativeOptimizer(
            MAKERS["sgd"](model.parameters()), "test", 4, 4, compression="none", grad_dtype=grad_dtype
        )
        model(torch.ones(4, 8, dtype=torch.bfloat16)).float().sum().backward()
        opt.step()
        assert opt.epoch == 1
        assert path.decoded == decoded
        opt.close()
        swarm.joined.clear()


class TestVectors:
    @pytest.mark.parametrize("n", [1, 1000, DEVICE_STEP + 3])
    def test_finite(self, n: int) -> None:
        """NaN and infinities are found anywhere; large values whose squares overflow are finite."""
        x = torch.full((n,), 3e38)
        assert all_finite(x)
        for bad in (float("nan"), float("inf"), float("-inf")):
            y = x.clone()
            y[n - 1] = bad
            assert not all_finite(y)

    @pytest.mark.parametrize("n", [7, DEVICE_STEP + 3])
    def test_clip_equals_the_host(self, n: int) -> None:
        """The clipped vector has the bits that the CPU gives."""
        x = torch.randn(n, generator=torch.Generator().manual_seed(0))
        host = x.clone().numpy()
        clip_norm(host, 0.5)
        clip_norm(x, 0.5)
        assert (x.numpy() == host).all()
