"""What a rank of a node may do to its optimizer, and what is told: on a node of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import ConfigurationError
from p2pavg.node.optimizer import NodeOptimizer
from tests.integrations.nodes import BATCH, batch, loss_of, net

pytestmark = pytest.mark.swarm


@pytest.fixture
def model() -> torch.nn.Module:
    return net()


@pytest.fixture
def opt(model: torch.nn.Module) -> Iterator[NodeOptimizer]:
    """An epoch takes four steps."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    made: NodeOptimizer = CollaborativeOptimizer(
        inner,
        "node",
        4 * BATCH,
        BATCH,
        initial_peers=[],
        compression="none",
        listen="127.0.0.1:0",
        node_group=dist.group.WORLD,
    )
    yield made
    made.close()
    dist.destroy_process_group()


def steps(model: torch.nn.Module, opt: NodeOptimizer, count: int) -> Iterator[int]:
    for at in range(count):
        loss_of(model, batch(0, at)).backward()
        opt.step()
        yield at


def test_a_rate_set_in_the_groups_is_stepped_with(model: torch.nn.Module, opt: NodeOptimizer) -> None:
    """The groups of a node's optimizer are those that step: a rate of zero leaves the parameters."""
    before = [param.detach().clone() for param in model.parameters()]
    for group in opt.param_groups:
        assert group["lr"] == 0.05
        group["lr"] = 0.0
    assert list(steps(model, opt, 8))
    assert opt.epoch == 2
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.0


def test_a_schedule_that_runs_ahead_is_told(
    model: torch.nn.Module, opt: NodeOptimizer, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule that the loop steps at each step(): one warning. Once per epoch: none."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        for _ in steps(model, opt, 8):
            if opt.stepped:
                schedule.step()
        assert not caplog.records
        for _ in steps(model, opt, 8):
            schedule.step()
    assert caplog.text.count("pass the schedule as scheduler=") == 1


def test_a_step_without_a_gradient_is_told(
    model: torch.nn.Module, opt: NodeOptimizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients that were cleared before step() leave samples without one: one warning."""
    with caplog.at_level(logging.WARNING, "p2pavg.node"):
        assert list(steps(model, opt, 2))
        assert not caplog.records
        for _ in range(2):
            loss_of(model, batch(0, 0)).backward()
            model.zero_grad()
            opt.step()
    assert caplog.text.count("without a backward()") == 1


def test_a_batch_of_another_size_than_the_first_ranks_is_refused(
    model: torch.nn.Module, opt: NodeOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first rank tells holds its samples: a rank that has others raises, and names drop_last=."""
    tell = opt._shards.tell
    monkeypatch.setattr(opt._shards, "tell", lambda word, noted, *rest: tell(word, noted + 1, *rest))
    with pytest.raises(ConfigurationError, match="drop_last=True"):
        assert list(steps(model, opt, 1))
    monkeypatch.undo()
