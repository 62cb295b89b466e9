"""target_batch_size="step": one step() of each peer present is an epoch, whatever the batch sizes."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from tests.swarm.test_one_process import together

pytestmark = pytest.mark.swarm

DEADLINE_S = 60.0
STEPS = 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(rank: int, at: int) -> torch.Tensor:
    """Of another size on each peer, and from step to step."""
    generator = torch.Generator().manual_seed(1000 * rank + at)
    return torch.randn(3 + rank + at % 2, 8, generator=generator)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(rows).square().sum(dim=1).mean()
    return found


@dataclass
class Trainer:
    """One peer: what it trains, and by epoch the samples of its average."""

    rank: int
    model: nn.Module = field(default_factory=net)
    counted: dict[int, int] = field(default_factory=dict)
    same: bool = False  # draws what peer 0 draws

    def __post_init__(self) -> None:
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def wrap(self, peers: list[str]) -> CollaborativeOptimizer:
        self.opt = CollaborativeOptimizer(
            self.inner, "lockstep", "step", initial_peers=peers, compression="none", listen="127.0.0.1:0"
        )
        return self.opt

    def step(self, at: int, passes: int = 2) -> None:
        """One step of the script, in two backward passes as under no_sync()."""
        rows = batch(0 if self.same else self.rank, at)
        for part in rows.chunk(passes):
            (loss(self.model, part) * (len(part) / len(rows))).backward()
        self.opt.step(batch_size=len(rows))
        self.opt.zero_grad()
        if self.opt.stepped and self.opt.last_report is not None:
            self.counted[self.opt.epoch] = self.opt.last_report.samples


def meet(trainers: list[Trainer]) -> None:
    """All in one run, and in each other's view."""
    for trainer in trainers:
        trainer.wrap([trainers[0].opt.peer.address] if trainer.rank else [])
    deadline = time.monotonic() + DEADLINE_S
    while any(len(trainer.opt.peers) < len(trainers) - 1 for trainer in trainers):
        assert time.monotonic() < deadline, "they do not see each other"
        time.sleep(0.01)


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_each_step_is_an_epoch_of_all_peers() -> None:
    """Uneven batches in two passes each: as many epochs as steps, and the training of one process."""
    trainers = [Trainer(0), Trainer(1)]
    meet(trainers)

    def run(trainer: Trainer) -> None:
        for at in range(STEPS):
            trainer.step(at)
            assert trainer.opt.stepped
            assert trainer.opt.epoch == at + 1

    try:
        together([lambda t=trainer: run(t) for trainer in trainers])  # type: ignore[misc]
    finally:
        for trainer in trainers:
            trainer.opt.close(0.0)
    alone = Trainer(0)
    for at in range(STEPS):
        rows = torch.cat([batch(0, at), batch(1, at)])
        alone.inner.zero_grad()
        loss(alone.model, rows).backward()
        alone.inner.step()
        assert trainers[0].counted[at + 1] == len(rows)
    assert torch.equal(bits(trainers[0].model), bits(trainers[1].model))
    torch.testing.assert_close(bits(trainers[0].model), bits(alone.model), rtol=1e-6, atol=1e-7)


def test_who_is_late_counts_in_the_next_epoch() -> None:
    """One peer stays away for several seconds: the others go on after one deadline, its step counts later."""
    trainers = [Trainer(0), Trainer(1)]
    meet(trainers)
    away = threading.Event()

    def regular(trainer: Trainer) -> None:
        for at in range(STEPS):
            trainer.step(at)
        away.set()  # it is over without the other one

    def late(trainer: Trainer) -> None:
        for at in range(4):
            trainer.step(at)
        assert away.wait(DEADLINE_S)
        trainer.step(4)

    try:
        together([lambda: regular(trainers[0]), lambda: late(trainers[1])])
        assert trainers[0].opt.epoch == STEPS
        assert trainers[0].counted[4] == len(batch(0, 3)) + len(batch(1, 3))
        assert trainers[0].counted[6] == len(batch(0, 5))
        assert trainers[1].opt.epoch >= STEPS
    finally:
        for trainer in trainers:
            trainer.opt.close(0.0)


def test_peers_that_draw_the_same_samples_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Equal first batches on two peers draw one warning that names the seed; different ones none."""
    for same in (False, True):
        caplog.clear()
        trainers = [Trainer(0), Trainer(1, same=same)]
        meet(trainers)

        def run(trainer: Trainer) -> None:
            for at in range(3):
                trainer.step(at)

        try:
            with caplog.at_level(logging.WARNING, "p2pavg.optim"):
                together([lambda t=trainer: run(t) for trainer in trainers])  # type: ignore[misc]
        finally:
            for trainer in trainers:
                trainer.opt.close(0.0)
        assert sum("same samples" in record.message for record in caplog.records) == int(same)
