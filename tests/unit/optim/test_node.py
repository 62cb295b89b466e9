"""A node, here of one rank: whose parameters, gradients and sums are whose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.rounds.training import Heal, State, copied
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, swarm, vector, wrap

__all__ = ["swarm"]  # the fixture


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def node(model: nn.Module, group: dist.ProcessGroup, target: int, **options: Any) -> Any:
    settings = {"batch_size_per_step": 4, "compression": "none", "initial_peers": [], "node_group": group}
    inner = MAKERS["sgd"](model.parameters())
    return CollaborativeOptimizer(inner, "test", target, **settings | options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["host", "offloaded", "sharded", "bfloat16"])
def test_a_node_trains_as_one_process(swarm: FakeSwarm, group: dist.ProcessGroup, kind: str) -> None:
    """Sums over several steps, of parameters in any layout, move the model as one process does."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        if kind != "sharded":  # FSDP takes no such layout
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.bfloat16() if kind == "bfloat16" else model

    def loss(model: nn.Module, at: int) -> torch.Tensor:
        rows = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(at))
        found: torch.Tensor = (
            model(rows.to(next(model.parameters()).dtype)).float().square().sum(dim=1).mean()
        )
        return found

    model, alone = build(), build()
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt = node(model, group, 16, offload_optimizer=kind == "offloaded")
    inner = MAKERS["sgd"](alone.parameters())
    for epoch in range(3):
        inner.zero_grad()
        for at in range(4 * epoch, 4 * epoch + 4):
            loss(model, at).backward()
            opt.step()
            (loss(alone, at) / 4).backward()
        inner.step()
        assert opt.epoch == epoch + 1
    if kind == "sharded":
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]
    else:
        assert relative(model, alone) <= (2e-2 if kind == "bfloat16" else 1e-6)
    opt.close()


@pytest.mark.parametrize("sharded", [False, True])
def test_sums_from_before_another_state_are_dropped(
    swarm: FakeSwarm, group: dist.ProcessGroup, sharded: bool
) -> None:
    """A state that comes while the node accumulates takes the sums along, on all ranks, and the next epoch is
    of gradients on that state alone.
    """
    donor, model = net(), net()
    opt_donor = wrap(donor, target_batch_size=4)
    for _ in range(2):
        loss_of(donor, [1, 2, 3, 4]).backward()
        opt_donor.step()
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    swarm.joined.clear()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt = node(model, group, 8, delay_updates=True, delay_warmup_epochs=0)
    swarm.before_arrival = lambda: swarm.joined[0].outcomes.append(Heal(State(2, b"x", meta, buffers)))
    for _ in range(2):
        loss_of(model, [5, 6, 7, 8]).backward()
        opt.step()
    opt.collaborative._update._job.result(60)  # the round is on another thread, and may begin late
    swarm.before_arrival = lambda: None
    loss_of(model, [5, 6, 7, 8]).backward()
    opt.step()  # on the parameters from before
    assert opt.epoch == 2
    whole = [param.full_tensor() if sharded else param for param in model.parameters()]  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([param.detach().flatten() for param in whole]), vector(donor))
    assert opt._noted == 0
    assert opt.collaborative.noted == 0
    assert all(total is None for total in opt._sums)
    assert not any(buffer.any() for buffer in opt.collaborative._flat.sums)
    opt.close()


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_half_changed_parameters_are_dropped(
    swarm: FakeSwarm, group: dist.ProcessGroup, sharded: bool
) -> None:
    """The node enters the run again, and what it had computed on these parameters is named and counts
    nowhere.
    """
    model = net()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt = node(model, group, 12)
    loss_of(model, [1, 2, 3, 4]).backward()
    opt.step()
    opt.collaborative._update.lost = True
    loss_of(model, [5, 6, 7, 8]).backward()
    opt.step()
    assert opt.collaborative.noted == opt._noted == 0
    assert all(total is None for total in opt._sums)
    assert not any(buffer.any() for buffer in opt.collaborative._flat.sums)
    opt.close()
