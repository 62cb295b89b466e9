from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from p2pavg.errors import ClosedError, ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.process import sigterm
from p2pavg.rounds.training import Heal, State, copied
from tests.unit.optim.fake_swarm import FakeSwarm

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=1e-2),
}


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> FakeSwarm:
    fake = FakeSwarm(1)
    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
    return fake


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sample(ids: list[int]) -> torch.Tensor:
    """Inputs of the samples with these ids."""
    return torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in ids])


def loss_of(model: nn.Module, ids: list[int], reduction: str = "mean") -> torch.Tensor:
    per_sample = model(sample(ids)).square().sum(dim=1)
    return per_sample.mean() if reduction == "mean" else per_sample.sum()


def wrap(model: nn.Module, make: Maker = MAKERS["sgd"], **options: Any) -> CollaborativeOptimizer:
    options = {
        "run_id": "test",
        "target_batch_size": 16,
        "batch_size_per_step": 4,
        "compression": "none",
    } | options
    return CollaborativeOptimizer(make(model.parameters()), **options)


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative(a: nn.Module, b: nn.Module) -> float:
    return float((vector(a) - vector(b)).norm() / vector(b).norm())


def train_alone(epochs: list[list[int]], make: Maker, scheduled: bool) -> nn.Module:
    """One process that takes every epoch's samples as one batch."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 10) if scheduled else None
    for ids in epochs:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("members", [1, 2, 3])
def test_many_peers_train_like_one_process(swarm: FakeSwarm, name: str, members: int) -> None:
    """N peers with a target of B samples end where one process with batches of the same samples ends."""
    swarm.members = members
    drawing = threading.Lock()
    epochs: list[list[int]] = [[] for _ in range(9)]
    next_id = iter(range(10**9))
    models = [net() for _ in range(members)]
    failures: list[BaseException] = []
    ready = threading.Barrier(members)

    def work(rank: int) -> None:
        try:
            model = models[rank]
            inner = MAKERS[name](model.parameters())
            scheduler: LRScheduler = CosineAnnealingLR(inner, 10)
            opt = CollaborativeOptimizer(
                inner, "test", 12 * members, batch_size_per_step=4, scheduler=scheduler, compression="none"
            )
            ready.wait(60)
            while opt.epoch < 8:
                with drawing:
                    ids = [next(next_id) for _ in range(4)]
                    epochs[opt.epoch].extend(ids)
                loss_of(model, ids).backward()
                opt.step()
                opt.zero_grad()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not failures
    alone = train_alone(epochs[:8], MAKERS[name], scheduled=True)
    for model in models:
        assert relative(model, alone) <= 1e-5
        assert torch.equal(vector(model), vector(models[0]))


def test_constructing_changes_no_weight(swarm: FakeSwarm) -> None:
    """Wrapping an optimizer leaves parameters, buffers and the random state as they are."""
    model = nn.Sequential(net(), nn.BatchNorm1d(4))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    wrap(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert torch.equal(torch.get_rng_state(), random)


def test_late_average_keeps_own_samples(swarm: FakeSwarm) -> None:
    """A straggler applies the others' average, and its own sum counts in the next epoch."""
    swarm.members = 2
    fast, slow = net(), net()
    opt_fast, opt_slow = wrap(fast, target_batch_size=8), wrap(slow, target_batch_size=8)
    swarm.late = {1}
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        loss_of(fast, ids).backward()
        opt_fast.step()
    swarm.late = set()
    assert (opt_fast.epoch, opt_slow.epoch) == (1, 0)
    before = copy.deepcopy(slow)
    loss_of(slow, [8, 9, 10, 11]).backward()  # computed on the old parameters
    own = [p.grad.clone() for p in slow.parameters() if p.grad is not None]
    opt_slow.step()
    assert opt_slow.epoch == 1
    assert torch.equal(vector(slow), vector(fast))
    assert not torch.equal(vector(slow), vector(before))
    for grad, param in zip(own, slow.parameters(), strict=True):
        assert param.grad is not None
        assert torch.equal(grad, param.grad)
    assert swarm.joined[1].samples() == 4


def test_reports_are_told_what_calculates(swarm: FakeSwarm) -> None:
    """The device of the parameters goes into every report: types of machines are known by it."""
    CollaborativeOptimizer(MAKERS["adamw"](net().parameters()), "test", 4, 4)
    assert swarm.joined[0].spec.device == "cpu"


def test_healing_loads_everything(swarm: FakeSwarm) -> None:
    """A peer that is behind ends with the donor's parameters, buffers, state, rates and schedule."""
    donor, model = nn.Sequential(net(), nn.BatchNorm1d(4)), nn.Sequential(net(), nn.BatchNorm1d(4))
    inner = MAKERS["adamw"](donor.parameters())
    schedule = CosineAnnealingLR(inner, 10)
    opt = CollaborativeOptimizer(inner, "test", 4, 4, scheduler=schedule, compression="none")
    for _ in range(3):
        loss_of(donor, [1, 2, 3, 4]).backward()
        opt.step()
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    swarm.joined.clear()

    mine = MAKERS["adamw"](model.parameters())
    mine_schedule = CosineAnnealingLR(mine, 10)
    healed = CollaborativeOptimizer(mine, "test", 8, 4, scheduler=mine_schedule, compression="none")
    loss_of(model, [7, 8, 9, 10]).backward()
    swarm.joined[0].outcomes.append(Heal(State(3, b"x", meta, buffers)))
    healed.step()
    assert healed.epoch == 3
    for key, value in donor.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    assert mine_schedule.state_dict() == schedule.state_dict()
    assert mine.param_groups[0]["lr"] == inner.param_groups[0]["lr"] != 1e-2
    for p, q in zip(model.parameters(), donor.parameters(), strict=True):
        assert p.grad is not None
        assert not p.grad.any()
        for key, value in inner.state[q].items():
            assert torch.equal(mine.state[p][key], value)


def test_a_joiner_loads_the_state_in_its_constructor(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the swarm runs already, the first step() computes on the swarm's parameters."""
    donor, model = net(), net()
    with torch.no_grad():
        for p in donor.parameters():
            p.add_(1)
    opt = wrap(donor)
    meta, buffers = copied(swarm.joined[0].spec.state.snapshot())
    original = swarm.peer

    def running(*args: Any, **kwargs: Any) -> Any:
        peer = original()
        training = peer.training

        def join(spec: Any) -> Any:
            joined = training(spec)
            joined.outcomes.append(Heal(State(5, b"x", meta, buffers)))
            return joined

        peer.training = join  # type: ignore[method-assign]
        return peer

    monkeypatch.setattr("p2pavg.optim.optimizer.Peer", running)
    opt = wrap(model)
    assert opt.epoch == 5
    assert torch.equal(vector(model), vector(donor))


def test_non_finite_gradients_never_leave(swarm: FakeSwarm) -> None:
    """A NaN in the sum means weight 0 and named samples; the epoch after is clean again."""
    swarm.members = 2
    good, bad = net(), net()
    opt_good, opt_bad = wrap(good, target_batch_size=4), wrap(bad, target_batch_size=4)
    (loss_of(bad, [1, 2, 3, 4]) * float("nan")).backward()
    loss_of(good, [5, 6, 7, 8]).backward()
    other = threading.Thread(target=opt_good.step)
    other.start()
    with swarm.condition:
        assert swarm.condition.wait_for(lambda: 0 in swarm.waiting, 60)
    opt_bad.step()
    other.join(60)
    assert swarm.discarded == [(4, "non-finite gradient")]
    assert torch.isfinite(vector(good)).all()
    assert torch.equal(vector(good), vector(bad))
    assert torch.equal(vector(good), vector(train_alone([[5, 6, 7, 8]], MAKERS["sgd"], scheduled=False)))
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in bad.parameters())


def test_zero_grad_never_loses_a_sum(swarm: FakeSwarm) -> None:
    """zero_grad() between steps changes nothing; after a backward() without step() it names discard()."""
    model = net()
    opt = wrap(model)
    loss_of(model, [1, 2, 3, 4]).backward()
    with pytest.raises(ConfigurationError, match=r"discard\(\)"):
        opt.zero_grad()
    opt.step()
    opt.zero_grad()
    opt.zero_grad(set_to_none=False)
    total = swarm.joined[0].samples()
    assert total == 4
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    opt.discard()
    opt.zero_grad()
    assert swarm.discarded == [(4, "discard() was called")]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_uneven_microbatches_need_a_weight(swarm: FakeSwarm) -> None:
    """An uneven step() without scale_loss() or loss_reduction="sum" raises and says so."""
    model = net()
    opt = wrap(model)
    loss_of(model, [1, 2, 3]).backward()
    with pytest.raises(ConfigurationError, match="scale_loss"):
        opt.step(batch_size=3)


@pytest.mark.parametrize("how", ["scale_loss", "sum"])
def test_uneven_microbatches_weigh_exactly(swarm: FakeSwarm, how: str) -> None:
    """scale_loss() and loss_reduction="sum" make uneven microbatches equal to one batch."""
    model = net()
    opt = wrap(model, loss_reduction="sum" if how == "sum" else "mean", target_batch_size=12)
    for ids in ([0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11]):
        if how == "sum":
            loss_of(model, ids, "sum").backward()
            opt.step(batch_size=len(ids))
        else:
            opt.scale_loss(loss_of(model, ids), len(ids)).backward()
            opt.step()
    assert opt.epoch == 1
    assert relative(model, train_alone([list(range(12))], MAKERS["sgd"], scheduled=False)) <= 1e-6


def test_clipping_is_that_of_one_big_batch(swarm: FakeSwarm) -> None:
    """max_grad_norm gives what clip_grad_norm_ gives on the gradient of the whole batch."""
    model, twin = net(), net()
    opt = wrap(model, max_grad_norm=0.5)
    for start in range(0, 16, 4):
        loss_of(model, list(range(start, start + 4))).backward()
        opt.step()
    optimizer = MAKERS["sgd"](twin.parameters())
    loss_of(twin, list(range(16))).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    optimizer.step()
    assert norm > 0.5
    assert relative(model, twin) <= 1e-6


def test_a_closure_is_called_once(swarm: FakeSwarm) -> None:
    """step(closure) computes the loss, counts its samples and returns it."""
    model = net()
    opt = wrap(model)
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        opt.zero_grad()
        loss = loss_of(model, [1, 2, 3, 4])
        loss.backward()
        return loss

    losses = [opt.step(closure).item() for _ in range(5)]
    assert len(calls) == 5
    assert opt.epoch == 1
    assert losses[0] == losses[3] != losses[4]


def test_the_scheduler_steps_once_per_epoch(swarm: FakeSwarm) -> None:
    """Learning rates follow epochs, not step() calls, and are seen through the wrapper."""
    model = net()
    inner = MAKERS["sgd"](model.parameters())
    opt = CollaborativeOptimizer(
        inner,
        "test",
        8,
        4,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(inner, 0.5),
        compression="none",
    )
    rates = []
    for _ in range(4):
        rates.append(opt.param_groups[0]["lr"])
        loss_of(model, [1, 2, 3, 4]).backward()
        opt.step()
    assert rates == [0.05, 0.05, 0.025, 0.025]


def test_checkpoint_and_resume(swarm: FakeSwarm) -> None:
    """state_dict() and load_state_dict() carry the inner state, the schedule and the epoch's place."""
    model = net()
    inner = MAKERS["adamw"](model.parameters())
    schedule = CosineAnnealingLR(inner, 10)
    opt = CollaborativeOptimizer(inner, "test", 4, 4, scheduler=schedule, compression="none")
    for _ in range(3):
        loss_of(model, [1, 2, 3, 4]).backward()
        opt.step()
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    loss_of(model, [5, 6, 7, 8]).backward()
    opt.step()
    opt.close()
    swarm.joined.clear()

    again = net()
    again_inner = MAKERS["adamw"](again.parameters())
    again_schedule = CosineAnnealingLR(again_inner, 10)
    resumed = CollaborativeOptimizer(again_inner, "test", 4, 4, scheduler=again_schedule, compression="none")
    again.load_state_dict(weights)
    swarm.joined.clear()
    resumed.load_state_dict(saved)
    assert saved["p2pavg"]["epoch"] == 3
    loss_of(again, [5, 6, 7, 8]).backward()
    resumed.step()
    assert torch.equal(vector(again), vector(model))
    assert again_schedule.state_dict() == schedule.state_dict()


def test_close_ends_training_and_frees_the_parameters(swarm: FakeSwarm) -> None:
    """After close() step() says so, and the parameters train with any other optimizer."""
    model = net()
    with wrap(model) as opt:
        loss_of(model, [1, 2, 3, 4]).backward()
        opt.step()
    assert opt.peer.closed
    with pytest.raises(ClosedError):
        opt.step()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("asked", "notices"), [(False, [None]), (True, [0.0])])
def test_a_second_sigterm_hands_nothing_over(
    swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch, asked: bool, notices: list[float | None]
) -> None:
    """SystemExit between two steps hands over, but not where SIGTERM raised it: its notice is over."""
    given: list[float | None] = []
    opt = wrap(net())
    monkeypatch.setattr(type(opt), "close", lambda _, notice_s=None: given.append(notice_s))
    monkeypatch.setattr(sigterm, "_asked_at", 0.0 if asked else None)
    with pytest.raises(SystemExit), opt:
        raise SystemExit(143)
    assert given == notices
    monkeypatch.undo()
    opt.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_batch_size": 3}, "at least 4"),
        ({"target_batch_size": 0}, "target_batch_size"),
        ({"target_batch_size": 2.5}, "target_batch_size"),
        ({"batch_size_per_step": -1}, "batch_size_per_step"),
        ({"run_id": ""}, "run_id"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"buffers": "mine"}, "buffers"),
        ({"resync_epochs": 0}, "resync_epochs"),
        ({"delay_warmup_epochs": None}, "delay_warmup_epochs"),
        ({"grad_dtype": "float32"}, "grad_dtype"),
        ({"initial_peers": ["10.0.0.5"]}, "'10.0.0.5' .* write host:port"),
        ({"listen": "nowhere"}, "'nowhere' .* write host:port"),
        ({"prices": "/nowhere/prices.toml"}, "cannot read the price table"),
    ],
)
def test_bad_arguments_name_the_fix(swarm: FakeSwarm, change: dict[str, Any], message: str) -> None:
    """Each argument that cannot work raises ConfigurationError before anything is opened."""
    with pytest.raises(ConfigurationError, match=message):
        wrap(net(), **change)
    assert not swarm.joined


def test_optimizers_and_schedulers_that_cannot_work(swarm: FakeSwarm) -> None:
    """LBFGS, SparseAdam, a scheduler of another optimizer and one that needs a metric are refused."""
    model = net()
    other = MAKERS["sgd"](net().parameters())
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ConfigurationError):
            wrap(model, make)
    inner = MAKERS["sgd"](model.parameters())
    for scheduler in (CosineAnnealingLR(other, 3), torch.optim.lr_scheduler.ReduceLROnPlateau(inner)):
        with pytest.raises(ConfigurationError):
            CollaborativeOptimizer(inner, "test", 8, 4, scheduler=scheduler)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="inner"):
        wrap(model).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_step_before_the_target_does_the_same_work_at_any_size(swarm: FakeSwarm) -> None:
    """step() below the target calls nothing that looks at gradients."""
    model = net()
    opt = wrap(model, target_batch_size=10**6)
    touched: list[str] = []
    for name in ("total", "repair", "averaged", "clear"):
        setattr(opt._flat, name, lambda *a, name=name, **k: touched.append(name))
    for _ in range(5):
        loss_of(model, [1, 2, 3, 4]).backward()
        opt.step()
    assert touched == []
    assert isinstance(swarm.joined[0].samples(), int)


def test_numpy_sample_counts_are_refused_clearly(swarm: FakeSwarm) -> None:
    """A float or a zero as batch size is a mistake that is named."""
    model = net()
    opt = wrap(model)
    loss_of(model, [1, 2, 3, 4]).backward()
    for value in (0, 1.5, np.float32(4)):
        with pytest.raises(ConfigurationError, match="whole number"):
            opt.step(batch_size=value)  # type: ignore[arg-type]
