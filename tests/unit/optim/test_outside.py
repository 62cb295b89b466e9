"""A schedule that runs ahead of the epochs, samples of a step, and whether a step() ended an epoch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from p2pavg.errors import ConfigurationError
from p2pavg.optim.updates.shown_schedule import ShownSchedule
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import loss_of, net, vector, wrap


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> FakeSwarm:
    fake = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
    return fake


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@pytest.mark.parametrize("by", ["a scheduler", "hand"])
def test_a_rate_that_changes_at_each_step_is_told(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """A schedule that runs ahead of the epochs draws one warning, which names scheduler= and opt.epoch."""
    model = net()
    with wrap(model, sgd) as opt, caplog.at_level(logging.WARNING, "p2pavg"):
        schedule = LambdaLR(opt, lambda count: 0.9**count)
        for at in range(12):
            loss_of(model, [at]).backward()
            opt.step()
            if by == "hand":
                opt.param_groups[0]["lr"] = 0.05 / (2 + at)
            else:
                schedule.step()
        told = [record.getMessage() for record in caplog.records]
    assert sum("scheduler=" in text and "opt.epoch" in text for text in told) == 1


@pytest.mark.parametrize("every", ["epoch", "scheduler="])
def test_a_schedule_stepped_once_per_epoch_draws_no_word(
    swarm: FakeSwarm, caplog: pytest.LogCaptureFixture, every: str
) -> None:
    """Neither the swarm's schedule nor one that the loop steps after `opt.stepped` is taken for a mistake."""
    model = net()
    inner = sgd(model.parameters())
    schedule = LambdaLR(inner, lambda count: 0.9**count)
    own = {"scheduler": schedule} if every == "scheduler=" else {}
    with wrap(model, lambda params: inner, **own) as opt, caplog.at_level(logging.WARNING, "p2pavg"):
        for at in range(16):
            loss_of(model, [at]).backward()
            opt.step()
            assert opt.stepped == (at % 4 == 3)
            if opt.stepped and not own:
                schedule.step()
        assert opt.epoch == 4
    assert not caplog.records


def test_samples_of_a_step_count_whatever_its_passes(swarm: FakeSwarm) -> None:
    """With samples_per_step, a step() of two backward() passes counts its samples once, and weighs as one."""
    model, plain = net(), net()
    with wrap(model, sgd) as opt:
        opt.samples_per_step = 4
        for at in range(4):
            for half in range(2):
                (loss_of(model, [4 * at + 2 * half, 4 * at + 2 * half + 1]) / 2).backward()
            opt.step()
        assert opt.epoch == 1
    reference = sgd(plain.parameters())
    loss_of(plain, list(range(16))).backward()
    reference.step()
    torch.testing.assert_close(vector(model), vector(plain), rtol=1e-6, atol=1e-7)


def test_other_samples_per_step_are_refused_in_the_middle(swarm: FakeSwarm) -> None:
    """samples_per_step cannot change what the steps before it weigh."""
    model = net()
    with wrap(model, sgd) as opt:
        loss_of(model, [1]).backward()
        opt.step()
        with pytest.raises(ConfigurationError, match="before the first"):
            opt.samples_per_step = 8


@pytest.mark.parametrize(
    "option", [{"delay_updates": True}, {"offload_optimizer": True}, {"outer": "diloco"}]
)
def test_lockstep_names_what_it_does_not_go_with(option: dict[str, Any]) -> None:
    """ "step" and options that work behind a step() are refused by the option's name."""
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        wrap(net(), sgd, target_batch_size="step", **option)


def test_a_word_that_is_no_target_is_refused() -> None:
    """Of texts, target_batch_size takes "step" alone."""
    with pytest.raises(ConfigurationError, match='"step"'):
        wrap(net(), sgd, target_batch_size="epoch")


def test_what_stands_for_a_scheduler_tells_the_last_steps_rate(swarm: FakeSwarm) -> None:
    """A framework reads the rate between step() and the scheduler's step(): that of the step just made."""
    model = net()
    inner = sgd(model.parameters())
    schedule = LambdaLR(inner, lambda count: 0.5**count)
    with wrap(model, lambda params: inner, target_batch_size=4, scheduler=schedule) as opt:
        shown = ShownSchedule(opt)
        for epoch in range(3):
            loss_of(model, [epoch]).backward()
            opt.step()
            assert shown.get_last_lr() == [0.05 * 0.5**epoch]
            shown.step()
        assert shown.get_last_lr() == [0.05 * 0.5**3]
        assert shown.state_dict() == {}


@pytest.mark.parametrize("watches", [True, False])
def test_gradients_are_watched_unless_a_tool_vouches_for_them(swarm: FakeSwarm, watches: bool) -> None:
    """Clipping to infinity costs checksums of the sums from then on, unless `watches_gradients` is False."""
    model = net()
    with wrap(model, sgd) as opt:
        opt.watches_gradients = watches
        for at in range(3):
            loss_of(model, [at]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            opt.step()
        assert opt._flat._edits.watching == [watches]


def test_it_knows_the_state_that_it_stands_at(swarm: FakeSwarm) -> None:
    """A state_dict() is the present one until the next epoch, and a foreign one never is."""
    model = net()
    with wrap(model, sgd, target_batch_size=4) as opt:
        saved = opt.state_dict()
        assert opt.stands_at(saved)
        assert not opt.stands_at(sgd(net().parameters()).state_dict())
        loss_of(model, [1]).backward()
        opt.step()
        assert opt.epoch == 1
        assert not opt.stands_at(saved)
