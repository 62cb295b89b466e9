"""Peers whose parameters drift apart by rounding, and are made equal again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pavg.errors import ConfigurationError, StateError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.updates.resync import Resync
from tests.unit.optim.fake_path import FakePath
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, swarm, vector

__all__ = ["swarm"]  # the fixture

WAYS: list[dict[str, Any]] = [{}, {"offload_optimizer": True}, {"delay_updates": True}]


def nudge(model: nn.Module) -> None:
    """The last bit of every parameter."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.nextafter(param, torch.tensor(float("inf"))))


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["waiting", "offload", "delayed"])
@pytest.mark.parametrize("name", MAKERS)
def test_drift_is_measured_and_reset(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch, name: str, way: dict[str, Any], accelerator: bool
) -> None:
    """A peer that errs in the last bit each epoch has its peers' bits again after every second one."""
    if accelerator:
        monkeypatch.setattr("p2pavg.optim.optimizer.open_cuda_path", lambda codec: lambda *place: FakePath())
    swarm.members = 2
    models = [net(), net()]
    after: list[list[torch.Tensor]] = [[], []]
    extras: list[list[dict[str, float]]] = [[], []]
    failures: list[BaseException] = []
    ready = threading.Barrier(2)

    def work(rank: int) -> None:
        try:
            opt = CollaborativeOptimizer(
                MAKERS[name](models[rank].parameters()), "test", 4, 4, resync_epochs=2, **way
            )
            masters = opt.inner.param_groups[0]["params"]
            ready.wait(60)
            for epoch in range(6):
                loss_of(models[rank], [8 * epoch + 4 * rank + i for i in range(4)]).backward()
                opt.step()
                opt._update.settle()
                after[rank].append(vector(nn.ParameterList(masters)).clone())
                extras[rank].append(opt._training.extra)  # type: ignore[attr-defined]
                if rank == 1:
                    nudge(nn.ParameterList(masters))
                    if not way:
                        continue
                    opt._masters.publish()  # type: ignore[union-attr]
            opt.close()
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    for epoch in range(6):
        assert torch.equal(after[0][epoch], after[1][epoch]) == (epoch % 2 == 1 or epoch == 0), epoch
    drifts = [extra.get("drift") for extra in extras[1]]
    assert [drift is not None for drift in drifts] == [False, True] * 3
    for drift in drifts[1::2]:
        assert drift is not None
        assert 0 < drift < 1e-6
    assert all(extra["drift_elements"] > 0 for extra in extras[1][1::2])


def test_state_is_averaged_too() -> None:
    """Moments travel behind the parameters; step counters, equal everywhere, do not."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    resync = Resync(optimizer, 1)
    assert resync.size == 3 * (3 + 4)
    whole = resync.extended(np.ones(5, np.float32), 0.5)
    assert whole[:5].tolist() == [0.5] * 5
    changed = whole[5:].copy()
    changed[7:] *= 2
    assert resync.replace(changed) == {"drift": 0.0, "drift_elements": 0.0}
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], torch.full((3,), 0.2))
    with pytest.raises(StateError, match="other state"):
        resync.replace(changed[1:])


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
def test_wrong_epochs_are_refused(swarm: FakeSwarm, epochs: Any) -> None:
    """resync_epochs is a number of epochs."""
    with pytest.raises(ConfigurationError, match="resync_epochs"):
        CollaborativeOptimizer(MAKERS["sgd"](net().parameters()), "test", 8, 4, resync_epochs=epochs)


def test_double_parameters_are_refused(swarm: FakeSwarm) -> None:
    """float64 parameters would be rounded."""
    with pytest.raises(ConfigurationError, match="float64"):
        CollaborativeOptimizer(MAKERS["sgd"](net().double().parameters()), "test", 8, 4, resync_epochs=3)
