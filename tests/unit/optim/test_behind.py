from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from p2pavg.errors import RoundFailedError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.updates import behind
from p2pavg.rounds.training import Heal, KeepGoing, State, copied
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, swarm, train_alone, vector, wrap

__all__ = ["swarm"]  # the fixture


def stale(epochs: int, make: Any) -> list[nn.Module]:
    """The parameters after every epoch of one process whose gradients, from epoch 2 on, are one epoch old."""
    model = net()
    optimizer = make(model.parameters())
    schedule = CosineAnnealingLR(optimizer, 10)
    versions = [copy.deepcopy(model)]
    for epoch in range(epochs):
        source = versions[epoch - 1] if epoch >= 2 else versions[epoch]
        grads = torch.autograd.grad(
            loss_of(source, [4 * epoch + i for i in range(4)]), list(source.parameters())
        )
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
        schedule.step()
        versions.append(copy.deepcopy(model))
    return versions


@pytest.mark.parametrize("name", MAKERS)
def test_delayed_gradients_are_one_epoch_old(swarm: FakeSwarm, name: str) -> None:
    """With one microbatch per epoch every gradient is exactly one epoch older than what it moves."""
    model = net()
    inner = MAKERS[name](model.parameters())
    opt = CollaborativeOptimizer(
        inner,
        "test",
        4,
        4,
        scheduler=CosineAnnealingLR(inner, 10),
        compression="none",
        delay_updates=True,
    )
    for epoch in range(6):
        loss_of(model, [4 * epoch + i for i in range(4)]).backward()
        opt.step()
        opt.zero_grad()
        assert opt.epoch == max(epoch, 1)
    versions = stale(6, MAKERS[name])
    assert torch.equal(vector(model), vector(versions[5]))
    opt.close()
    assert torch.equal(vector(model), vector(versions[6]))


def test_training_goes_on_while_the_round_lasts(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() returns while the average is under way; after a whole share more it waits for it."""
    model = net()
    opt = wrap(model, target_batch_size=8, delay_updates=True, delay_warmup_epochs=0)
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert gate.wait(60)

    swarm.before_arrival = hold
    before = vector(model).clone()
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        loss_of(model, ids).backward()
        opt.step()
    assert entered.wait(60)
    for param in model.parameters():
        assert param.grad is not None
        assert not param.grad.any()  # epoch 1 accumulates from zero
    loss_of(model, [8, 9, 10, 11]).backward()
    opt.step()  # less than a share: does not wait
    assert torch.equal(vector(model), before)
    assert opt.epoch == 0
    swarm.before_arrival = lambda: None
    waits = behind.wait

    def waited_for(jobs: Any) -> Any:
        gate.set()  # step() waits by now
        return waits(jobs)

    monkeypatch.setattr(behind, "wait", waited_for)
    loss_of(model, [12, 13, 14, 15]).backward()
    opt.step()
    assert opt.epoch == 1
    assert swarm.joined[0].extra["seconds_step_waited"] > 0
    opt.close()
    assert opt.epoch == 2
    assert relative(model, _two_epochs_at_once()) <= 1e-6


def _two_epochs_at_once() -> nn.Module:
    """Both gradients computed on the initial parameters, applied one after the other."""
    model = net()
    start = copy.deepcopy(model)
    optimizer = MAKERS["sgd"](model.parameters())
    for ids in (range(8), range(8, 16)):
        grads = torch.autograd.grad(loss_of(start, list(ids)), list(start.parameters()))
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    return model


@pytest.mark.parametrize("what", ["fails", "keeps going"])
def test_sums_come_back_when_nothing_was_averaged(swarm: FakeSwarm, what: str) -> None:
    """After a failed or withdrawn round the contribution counts in the next one, by its own weight."""
    model = net()
    opt = wrap(model, target_batch_size=4, delay_updates=True, delay_warmup_epochs=0)
    training = swarm.joined[0]
    arrive = training.arrive

    def instead(contribution: Any) -> Any:
        training.arrive = arrive  # type: ignore[method-assign]
        if what == "fails":
            raise RoundFailedError("the others are gone")
        return KeepGoing()

    training.arrive = instead  # type: ignore[method-assign]
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    loss_of(model, [4, 5, 6, 7]).backward()
    if what == "fails":
        with pytest.raises(RoundFailedError):
            opt.step()
        assert training.samples() == 8
        loss_of(model, [8, 9, 10, 11]).backward()
    opt.step()
    opt.close()
    samples = range(12) if what == "fails" else range(8)
    alone = train_alone([list(samples)], MAKERS["sgd"], scheduled=False)
    assert relative(model, alone) <= 1e-6


def test_healing_while_behind(swarm: FakeSwarm) -> None:
    """A Heal replaces masters and model alike, and what was accumulated is gone."""
    donor, model = net(), net()
    opt_donor = wrap(donor, MAKERS["adamw"], target_batch_size=4)
    for _ in range(2):
        loss_of(donor, [1, 2, 3, 4]).backward()
        opt_donor.step()
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    swarm.joined.clear()
    opt = wrap(model, MAKERS["adamw"], target_batch_size=4, delay_updates=True, delay_warmup_epochs=0)
    swarm.joined[0].outcomes.append(Heal(State(2, b"x", meta, buffers)))
    loss_of(model, [5, 6, 7, 8]).backward()
    opt.step()
    opt._update.settle()
    assert opt.epoch == 2
    assert torch.equal(vector(model), vector(donor))
    loss_of(model, [5, 6, 7, 8]).backward()
    opt.step()
    opt.close()
    loss_of(donor, [5, 6, 7, 8]).backward()
    opt_donor.inner.step()
    assert relative(model, donor) <= 1e-6


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("delay", [False, True])
def test_offload_steps_like_the_device(swarm: FakeSwarm, name: str, delay: bool) -> None:
    """Float32 masters on the CPU give the parameters that the inner optimizer alone gives."""
    model = net()
    opt = wrap(model, MAKERS[name], target_batch_size=4, offload_optimizer=True, delay_updates=delay)
    for epoch in range(5):
        loss_of(model, [4 * epoch + i for i in range(4)]).backward()
        opt.step()
    opt.close()
    if delay:
        swarm.joined.clear()
        alone = net()
        twin = wrap(alone, MAKERS[name], target_batch_size=4, delay_updates=True)
        for epoch in range(5):
            loss_of(alone, [4 * epoch + i for i in range(4)]).backward()
            twin.step()
        twin.close()
    else:
        epochs = [[4 * epoch + i for i in range(4)] for epoch in range(5)]
        alone = train_alone(epochs, MAKERS[name], scheduled=False)
    assert relative(model, alone) <= 1e-6


def test_offload_keeps_small_steps_of_half_parameters(swarm: FakeSwarm) -> None:
    """bfloat16 parameters have float32 masters: steps below their resolution add up."""
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    opt = CollaborativeOptimizer(
        torch.optim.SGD([param], lr=1e-3),
        "test",
        1,
        1,
        compression="none",
        offload_optimizer=True,
        grad_dtype=torch.float32,
    )
    for _ in range(100):
        param.sum().backward()
        opt.step()
    assert torch.equal(param.detach(), torch.full((64,), 0.9, dtype=torch.bfloat16))


def test_groups_show_the_models_parameters(swarm: FakeSwarm) -> None:
    """The wrapper shows the model's parameters; rates read and write through to the inner groups."""
    model = net()
    inner = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    )
    opt = CollaborativeOptimizer(inner, "test", 8, 4, compression="none", offload_optimizer=True)
    shown = [param for group in opt.param_groups for param in group["params"]]
    assert [id(param) for param in shown] == [id(param) for param in model.parameters()]
    opt.param_groups[0]["lr"] = 0.05
    inner.param_groups[1]["lr"] = 0.07
    assert inner.param_groups[0]["lr"] == 0.05
    assert [group["lr"] for group in opt.param_groups] == [0.05, 0.07]
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    opt._opt_called = True  # type: ignore[attr-defined]
    schedule.step()
    assert [group["lr"] for group in inner.param_groups] == [0.025, 0.035]


def test_close_gives_the_inner_optimizer_back(swarm: FakeSwarm) -> None:
    """After close() the inner optimizer trains the model's own parameters with the state it gathered."""
    model = net()
    inner = MAKERS["adamw"](model.parameters())
    opt = CollaborativeOptimizer(inner, "test", 4, 4, compression="none", offload_optimizer=True)
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    opt.close()
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert not inner.param_groups[0]["fused"]
    loss_of(model, [4, 5, 6, 7]).backward()
    inner.step()
    alone = train_alone([[0, 1, 2, 3], [4, 5, 6, 7]], MAKERS["adamw"], scheduled=False)
    assert relative(model, alone) <= 1e-6


def test_checkpoints_carry_the_masters(swarm: FakeSwarm) -> None:
    """state_dict() waits for the pending step and holds float32 masters; loading restores them."""

    def build() -> tuple[nn.Parameter, CollaborativeOptimizer]:
        param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        inner = torch.optim.SGD([param], lr=1e-3)
        return param, CollaborativeOptimizer(
            inner, "test", 1, 1, compression="none", offload_optimizer=True, delay_updates=True
        )

    param, opt = build()
    for _ in range(3):
        param.sum().backward()
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    weights = param.detach().clone()
    assert saved["p2pavg"]["epoch"] == 3
    opt.close()
    swarm.joined.clear()
    again, resumed = build()
    with torch.no_grad():
        again.copy_(weights)
    swarm.joined.clear()
    resumed.load_state_dict(saved)
    assert resumed._masters is not None
    assert torch.allclose(resumed._masters.params[0], torch.full((64,), 1 - 3e-3))
    resumed.close()
