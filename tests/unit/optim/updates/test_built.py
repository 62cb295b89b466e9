"""What a newcomer is told of options that the run's state replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.rounds.training import Heal, State, copied
from tests.unit.optim.fake_swarm import FakePeer, FakeSwarm, FakeTraining
from tests.unit.optim.test_optimizer import net, swarm

__all__ = ["swarm"]  # the fixture

TOLD = "the run's state replaces"
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
Maker = Callable[[Any], torch.optim.Optimizer]


class OwnSchedule(LRScheduler):
    """Sets the weight decay beside the learning rate."""

    def get_lr(self) -> list[float | torch.Tensor]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return [0.9 * group["lr"] for group in self.optimizer.param_groups]


SCHEDULES: dict[str, Schedule] = {
    "lambda": lambda inner: LambdaLR(inner, lambda count: 0.9**count),
    "one cycle": lambda inner: OneCycleLR(inner, 0.4, total_steps=20),
    "cycles": lambda inner: CyclicLR(inner, 0.05, 0.4, step_size_up=3),
    "one's own": OwnSchedule,
    "two": lambda inner: SequentialLR(inner, [OwnSchedule(inner), OwnSchedule(inner)], [1]),
}


def sgd(lr: float, decay: float = 0.0) -> Maker:
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=decay)


def built(make: Maker, schedule: Schedule | None, **options: Any) -> CollaborativeOptimizer:
    model = net()
    inner = make(model.parameters())
    own = None if schedule is None else schedule(inner)
    return CollaborativeOptimizer(inner, "test", 16, 4, compression="none", scheduler=own, **options)


def stepped(founder: CollaborativeOptimizer) -> None:
    """An epoch of the founder's is over."""
    founder.inner.step()
    assert founder.options.scheduler is not None
    founder.options.scheduler.step()
    founder._state.settle(1)


def newcomer(
    swarm: FakeSwarm, make: Maker, schedule: Schedule | None, monkeypatch: pytest.MonkeyPatch
) -> CollaborativeOptimizer:
    """One that takes over the state of the swarm's first peer."""
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    enter = FakePeer.training

    def entered(self: FakePeer, spec: Any) -> FakeTraining:
        training = enter(self, spec)
        training.outcomes.append(Heal(State(5, b"x", meta, buffers)))
        return training

    monkeypatch.setattr(FakePeer, "training", entered)
    return built(make, schedule)


@pytest.mark.parametrize("schedule", [None, "lambda", "one's own"])
def test_another_rate_is_told_once_with_both_values(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, schedule: str | None
) -> None:
    """Of a scheduler's optimizer it is the rate that the schedule began with."""
    how = None if schedule is None else SCHEDULES[schedule]
    built(sgd(0.1), how)
    taken = newcomer(swarm, sgd(0.5), how, monkeypatch)
    (text,) = (record.getMessage() for record in caplog.records if TOLD in record.getMessage())
    assert ("(lr 0.5 by 0.1)" if how is None else "(initial_lr 0.5 by 0.1)") in text
    assert taken.epoch == 5


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_what_a_schedule_has_set_is_no_difference(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, schedule: str | None
) -> None:
    """A newcomer built as the founder was says nothing, however far the founder's schedule is."""
    how = None if schedule is None else SCHEDULES[schedule]
    founder = built(sgd(0.1), how)
    for _ in range(3 if how else 0):
        stepped(founder)
    newcomer(swarm, sgd(0.1), how, monkeypatch)
    assert TOLD not in caplog.text


def test_another_weight_decay_beside_a_scheduler_is_told(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule of torch sets the rate, and the momentum perhaps: all else is the user's."""
    founder = built(sgd(0.1), SCHEDULES["one cycle"])
    stepped(founder)
    newcomer(swarm, sgd(0.1, 0.01), SCHEDULES["one cycle"], monkeypatch)
    assert "(weight_decay 0.01 by 0.0)" in caplog.text
