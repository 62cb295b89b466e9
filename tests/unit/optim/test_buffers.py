from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg.optim.updates.buffers import AveragedBuffers
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import swarm, wrap

__all__ = ["swarm"]  # the fixture


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(4096, dtype=torch.float32) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]


def train(model: nn.Module, opt: Any, seed: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
@pytest.mark.parametrize("way", [{}, {"delay_updates": True, "delay_warmup_epochs": 0}])
def test_statistics_are_averaged_and_constants_are_not_touched(
    swarm: FakeSwarm, compression: str, way: dict[str, Any]
) -> None:
    """After an epoch the BatchNorm statistics are the mean of all peers', to the bit; constants stay."""
    swarm.members = 2
    models = [Model(), Model()]
    opts = [wrap(model, target_batch_size=4, compression=compression, **way) for model in models]
    table = models[0].table.clone()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, models, opts, [1, 2]))
    alone = [Model(), Model()]
    for model, seed in zip(alone, [1, 2], strict=True):
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
    for opt in opts:
        opt._update.settle()
        assert opt.epoch == 1
    mean = (alone[0].norm.running_var + alone[1].norm.running_var) / 2
    tolerance = {"none": 1e-6, "fp16": 1e-3, "int8": 2e-2}[compression]
    for model in models:
        torch.testing.assert_close(model.norm.running_var, mean, rtol=tolerance, atol=tolerance)
        assert torch.equal(model.norm.running_var, models[0].norm.running_var)
        assert torch.equal(model.norm.running_mean, models[0].norm.running_mean)
        assert torch.equal(model.table, table)


def test_a_snapshot_holds_what_all_agree_on(swarm: FakeSwarm) -> None:
    """In mid-epoch a donor gives the statistics of the last average, not its own since."""
    model = Model()
    opt = wrap(model, target_batch_size=8)
    before = model.norm.running_var.clone()
    train(model, opt, 1)
    assert not torch.equal(model.norm.running_var, before)
    agreed = opt._state._buffers()
    assert any(torch.equal(buffer, before) for buffer in agreed if buffer.shape == before.shape)
    train(model, opt, 2)
    assert opt.epoch == 1
    agreed = opt._state._buffers()
    assert any(
        torch.equal(buffer, model.norm.running_var) for buffer in agreed if buffer.shape == before.shape
    )


@pytest.mark.parametrize("counted", [True, False])
def test_changes_after_the_contribution_stay_on_top(counted: bool) -> None:
    """What a buffer gained while the average was under way is kept; what was not averaged too."""
    buffer = torch.zeros(3)
    averaged = AveragedBuffers(lambda: [buffer])
    buffer += 1.0
    assert averaged.deltas().tolist() == [1.0, 1.0, 1.0]
    buffer += 0.25
    result = torch.full((3,), 0.5).numpy()
    averaged.agree(result)
    averaged.follow(result, counted)
    assert averaged.agreed()[0].tolist() == [0.5] * 3
    assert buffer.tolist() == [0.75 if counted else 1.75] * 3
    averaged.restore()
    assert buffer.tolist() == [0.5] * 3


@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
@pytest.mark.parametrize("way", [{}, {"delay_updates": True, "delay_warmup_epochs": 0}])
def test_statistics_of_the_leader(swarm: FakeSwarm, compression: str, way: dict[str, Any]) -> None:
    """buffers="leader": after an epoch all peers have the leader's BatchNorm statistics; constants stay."""
    swarm.members = 2
    models = [Model(), Model()]
    opts = [
        wrap(model, target_batch_size=4, compression=compression, buffers="leader", **way) for model in models
    ]
    table = models[0].table.clone()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, models, opts, [1, 2]))
    alone = Model()
    alone(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    for opt in opts:
        opt._update.settle()
    assert torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    assert torch.equal(models[0].norm.running_var, models[1].norm.running_var)
    bound = {"none": 1e-6, "fp16": 1e-3, "int8": 2e-2}[compression]
    for model in models:
        torch.testing.assert_close(model.norm.running_mean, alone.norm.running_mean, rtol=0, atol=bound)
        torch.testing.assert_close(model.norm.running_var, alone.norm.running_var, rtol=0, atol=bound)
        assert torch.equal(model.table, table)
    for opt in opts:
        opt.close(0.0)
