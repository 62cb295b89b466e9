"""CollaborativeOptimizer beside what PyTorch users combine optimizers with."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from p2pavg.errors import ConfigurationError
from p2pavg.optim.optimizer import CollaborativeOptimizer
from p2pavg.optim.outer.settings import Outer
from tests.unit.optim.fake_swarm import FakeSwarm
from tests.unit.optim.test_optimizer import MAKERS, loss_of, net, relative, sample, swarm, vector, wrap

__all__ = ["swarm"]  # the fixture

Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}
EPOCHS = [list(range(8 * epoch, 8 * epoch + 8)) for epoch in range(4)]


def swarm_and_alone(
    make: Maker,
    schedule: Callable[[Any], Any] | None = None,
    loss: Callable[[nn.Module, list[int]], torch.Tensor] = loss_of,
    build: Callable[[], nn.Module] = net,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """The same four epochs, collaboratively in two microbatches each, and in one process by hand."""
    model, alone = build(), build()
    inner, optimizer = make(model.parameters()), make(alone.parameters())
    schedules = [schedule(o) if schedule is not None else None for o in (inner, optimizer)]
    with CollaborativeOptimizer(
        inner, "test", 8, 4, scheduler=schedules[0], compression="none", **options
    ) as opt:
        for ids in EPOCHS:
            for half in (ids[:4], ids[4:]):
                loss(model, half).backward()
                opt.step()
                opt.zero_grad()
        assert opt.epoch == 4
    for ids in EPOCHS:
        optimizer.zero_grad()
        for half in (ids[:4], ids[4:]):
            (loss(alone, half) / 2).backward()
        optimizer.step()
        if schedules[1] is not None:
            schedules[1].step()
    return model, alone


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_alone(swarm: FakeSwarm, name: str, offload: bool) -> None:
    """Each of torch's optimizers gives what it gives without us, on the device and offloaded."""
    model, alone = swarm_and_alone(OPTIMIZERS[name], offload_optimizer=offload)
    assert relative(model, alone) <= 2e-6


@pytest.mark.parametrize("offload", [False, True])
def test_lamb_of_timm(swarm: FakeSwarm, offload: bool) -> None:
    """An optimizer from elsewhere, which looks at whole layers, steps as alone."""
    lamb = pytest.importorskip("timm.optim", reason="timm is not installed").Lamb
    model, alone = swarm_and_alone(lambda p: lamb(p, lr=1e-2), offload_optimizer=offload)
    assert relative(model, alone) <= 2e-6


def test_options_come_back(swarm: FakeSwarm) -> None:
    """What offload changes in the groups (fused, foreach, capturable) is as before after close()."""
    inner = torch.optim.AdamW(net().parameters(), lr=1e-2, capturable=True, foreach=False)
    before = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
    with CollaborativeOptimizer(inner, "test", 8, 4, offload_optimizer=True):
        assert inner.param_groups[0]["fused"]
        assert not inner.param_groups[0]["capturable"]
    assert {key: value for key, value in inner.param_groups[0].items() if key != "params"} == before


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_counts_epochs(swarm: FakeSwarm, name: str) -> None:
    """Each scheduler steps once per epoch, as in one process."""
    model, alone = swarm_and_alone(MAKERS["sgd"], SCHEDULERS[name])
    assert relative(model, alone) <= 1e-6


@pytest.mark.parametrize("offload", [False, True])
def test_a_plateau_lowers_the_rate(swarm: FakeSwarm, offload: bool) -> None:
    """ReduceLROnPlateau, stepped with a metric by the training script, sets the next step's rate."""
    model, alone = net(), net()
    inner, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    plateaus = [lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0) for o in (inner, optimizer)]
    with CollaborativeOptimizer(inner, "test", 8, 8, compression="none", offload_optimizer=offload) as opt:
        for ids in EPOCHS:
            loss_of(model, ids).backward()
            opt.step()
            plateaus[0].step(1.0)
        assert opt.param_groups[0]["lr"] == pytest.approx(1e-4)
    for ids in EPOCHS:
        optimizer.zero_grad()
        loss_of(alone, ids).backward()
        optimizer.step()
        plateaus[1].step(1.0)
    assert relative(model, alone) <= 1e-6


async def test_a_cell_of_a_notebook() -> None:
    """In a Jupyter kernel an event loop runs on the main thread: it trains there, and again when rerun."""
    for _ in range(2):
        model = net()
        with CollaborativeOptimizer(
            MAKERS["sgd"](model.parameters()), "cell", 8, 4, initial_peers=[], listen="127.0.0.1:0"
        ) as opt:
            before = vector(model).clone()
            while opt.epoch < 2:
                loss_of(model, [0, 1, 2, 3]).backward()
                opt.step()
        assert not torch.equal(vector(model), before)
    await asyncio.sleep(0)


def test_groups_with_their_own_rates(swarm: FakeSwarm) -> None:
    """Parameter groups keep their options."""

    def make(params: Any) -> torch.optim.Optimizer:
        first, *rest = list(params)
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.01, momentum=0.9)

    model, alone = swarm_and_alone(make)
    assert relative(model, alone) <= 1e-6


def test_tied_and_unused_parameters(swarm: FakeSwarm) -> None:
    """A tied weight moves once; a parameter that no loss touches stays to the bit, weight decay or not."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Tied()

    model, alone = swarm_and_alone(MAKERS["adamw"], build=build)
    assert relative(model, alone) <= 1e-6
    assert isinstance(model, Tied)
    assert torch.equal(model.unused.weight, build().unused.weight)  # type: ignore[attr-defined]


def test_zero_initialised_layers_move_like_alone(swarm: FakeSwarm) -> None:
    """A gradient that is exactly zero, behind a zero-initialised layer, still counts as a gradient."""

    def build() -> nn.Module:
        model = net()
        nn.init.zeros_(model[2].weight)
        return model

    def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
        return (model(sample(ids)) - 1).square().sum(dim=1).mean()

    model, alone = swarm_and_alone(MAKERS["adamw"], loss=loss, build=build)
    assert relative(model, alone) <= 1e-6


def test_compiled_models(swarm: FakeSwarm) -> None:
    """torch.compile changes nothing about accumulation."""
    compiled: dict[int, Any] = {}

    def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
        run = compiled.setdefault(id(model), torch.compile(model, backend="aot_eager"))
        return loss_of(run, ids)

    model, alone = swarm_and_alone(MAKERS["sgd"], loss=loss)
    assert relative(model, alone) <= 1e-6


def test_activation_checkpointing(swarm: FakeSwarm) -> None:
    """Recomputing activations changes nothing about accumulation."""

    def loss(model: nn.Module, ids: list[int]) -> torch.Tensor:
        output = checkpoint(model, sample(ids), use_reentrant=False)
        return output.square().sum(dim=1).mean()

    model, alone = swarm_and_alone(MAKERS["sgd"], loss=loss)
    assert relative(model, alone) <= 1e-6


def test_a_copied_model_is_independent(swarm: FakeSwarm) -> None:
    """deepcopy(model) in mid-epoch gives a model whose training leaves the swarm's sums alone."""
    model = net()
    opt = wrap(model)
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    sums = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    twin = copy.deepcopy(model)
    loss_of(twin, [4, 5, 6, 7]).backward()
    for before, p in zip(sums, model.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(before, p.grad)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigurationError, match="state_dict"):
            duplicate(opt)


def test_two_optimizers_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN's two optimizers, in two swarms, do not see each other's samples or gradients."""
    swarms = [FakeSwarm(1), FakeSwarm(1)]
    models = [net(), net()]
    opts = []
    for fake, model in zip(swarms, models, strict=True):
        monkeypatch.setattr("p2pavg.optim.optimizer.Peer", fake.peer)
        opts.append(wrap(model, target_batch_size=8))
    before = vector(models[1]).clone()
    for _ in range(2):
        loss_of(models[0], [0, 1, 2, 3]).backward()
        opts[0].step()
    assert [opt.epoch for opt in opts] == [1, 0]
    assert torch.equal(vector(models[1]), before)
    loss_of(models[1], [0, 1, 2, 3]).backward()
    opts[1].step()
    assert [fake.joined[0].samples() for fake in swarms] == [0, 4]


def test_step_hooks_run(swarm: FakeSwarm) -> None:
    """Hooks registered on the wrapper see every step()."""
    model = net()
    opt = wrap(model)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("offload", [False, True])
def test_load_state_dict_assign_is_followed(swarm: FakeSwarm, offload: bool) -> None:
    """After load_state_dict(assign=True) the optimizer goes on with the new parameters and its sums."""
    model, alone = net(), net()
    opt = wrap(model, target_batch_size=8, offload_optimizer=offload)
    loss_of(model, [0, 1, 2, 3]).backward()
    opt.step()
    old = next(model.parameters())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert next(model.parameters()) is not old
    for ids in ([4, 5, 6, 7], *([8 + 4 * i + j for j in range(4)] for i in range(2))):
        loss_of(model, ids).backward()
        opt.step()
    assert opt.epoch == 2
    optimizer = MAKERS["sgd"](alone.parameters())
    for ids in (range(8), range(8, 16)):
        optimizer.zero_grad()
        loss_of(alone, list(ids)).backward()
        optimizer.step()
    assert relative(model, alone) <= 1e-6


@pytest.mark.parametrize("outer", [None, Outer()])
def test_a_parameter_added_to_the_inner_optimizer_is_refused(swarm: FakeSwarm, outer: Outer | None) -> None:
    """It would train here alone: the next step() names its shape, before anything is counted."""
    model = net()
    with wrap(model, outer=outer) as opt:
        loss_of(model, [0, 1, 2, 3]).backward()
        opt.inner.add_param_group({"params": [nn.Parameter(torch.zeros(3, 5))]})
        with pytest.raises(ConfigurationError, match=r"\[3, 5\].*before you wrap it"):
            opt.step()
        assert swarm.joined[0].counted == 0
