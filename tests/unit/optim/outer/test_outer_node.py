"""A node with outer steps, of a group of one rank: what it does is what a single peer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from tests.unit.optim.fake_swarm import FakeSwarm


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    # Each peer has a swarm of its own.
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", lambda *args, **kwargs: FakeSwarm(1).peer())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def net(*, sharded: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    if not sharded:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def wrap(model: nn.Module, settings: Outer, group: object, run_id: str = "node") -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return CollaborativeOptimizer(
        inner,
        run_id,
        16,
        4,
        compression="none",
        outer=settings,
        scheduler=LambdaLR(inner, lambda count: 0.8**count),
        max_grad_norm=0.1,
        node_group=group,
    )


def train(model: nn.Module, opt: Any, numbers: range) -> None:
    for number in numbers:
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        model(rows).square().mean().backward()
        opt.step()
        opt.zero_grad()


def vector(model: nn.Module) -> torch.Tensor:
    found = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([value.detach().flatten() for value in found])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "settings", [Outer(), Outer(accumulate=2, schedule="outer"), Outer(overlap=1, keep_local=0.5)]
)
def test_a_node_does_what_a_single_peer_does(
    group: dist.ProcessGroup, settings: Outer, sharded: bool
) -> None:
    """Clipping, schedule, accumulation, overlap, and a state that is saved and loaded: parameters and epochs
    are those of a single peer, of which `inner` is stepped itself.
    """
    found = []
    for each, as_shards in ((None, False), (group, sharded)):
        model = net(sharded=as_shards)
        opt = wrap(model, settings, each)
        train(model, opt, range(10))
        epoch, saved, weights = opt.epoch, opt.state_dict(), vector(model).clone()
        opt.close()
        ended = vector(model).clone()
        other = net(sharded=as_shards)
        with torch.no_grad():
            for param, value in zip(other.parameters(), model.parameters(), strict=True):
                param.copy_(value)
        again = wrap(other, settings, each, "again")
        again.load_state_dict(saved)
        train(other, again, range(10, 12))
        found.append((epoch, again.epoch, weights, ended, vector(other).clone()))
        again.close()
    single, node = found
    assert node[:2] == single[:2]
    assert single[0] >= 2
    for ours, theirs in zip(node[2:], single[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_state_that_a_node_stands_at_changes_nothing(group: dist.ProcessGroup) -> None:
    """Loaded between two outer steps, also of shards: what the ranks moved since stays."""
    for sharded in (False, True):
        model = net(sharded=sharded)
        opt = wrap(model, Outer(), group)
        train(model, opt, range(6))
        before = vector(model).clone()
        opt.load_state_dict(opt.state_dict())
        assert torch.equal(vector(model), before)
        assert opt.epoch == 1
        train(model, opt, range(6, 8))
        assert opt.epoch == 2
        opt.close()
