"""Ways in which Lightning is used: what a step of theirs counts in a swarm."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from p2pavg import RoundReport
from tests.integrations.processes import BATCH, net
from tests.integrations.tools import NORM, QUIET, lightning_trainer, tensors

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule

from p2pavg.lightning import CollaborativeStrategy

pytestmark = pytest.mark.swarm


class Module(LightningModule):
    def __init__(self, skips: bool = False, steps: int = 0) -> None:
        """skips: every second batch has no loss. steps: by hand, so many a batch; 0: Lightning steps."""
        super().__init__()
        self.net, self.skips, self.steps = net(), skips, steps
        self.automatic_optimization = not steps

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        for _ in range(self.steps):
            self.manual_backward(self._loss(batch))
            self.optimizers().step()
            self.optimizers().zero_grad()
        if self.steps or (self.skips and index % 2):
            return None
        return self._loss(batch)

    def _loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, module: Module, target: int | str = 2 * BATCH, fits: int = 1, **settings: Any
) -> tuple[list[RoundReport], CollaborativeStrategy]:
    """A peer that trains alone: its reports and strategy."""
    reports: list[RoundReport] = []
    strategy = CollaborativeStrategy("settings", target, initial_peers=[], on_round=reports.append, **QUIET)
    trainer = lightning_trainer(
        folder, strategy=strategy, **{"gradient_clip_val": None, "max_steps": 4} | settings
    )
    for _ in range(fits):
        trainer.fit(module, DataLoader(tensors(0, 1), batch_size=BATCH))
    return reports, strategy


def test_a_batch_without_loss_counts_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """training_step() that returns None is no step: four epochs of two batches end as the batches that have a
    loss say, without a warning.
    """
    module, plain = Module(skips=True), net()
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        reports, _ = fit(tmp_path, module)
    assert [report.samples for report in reports] == [2 * BATCH] * 4
    assert not caplog.records
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = list(DataLoader(tensors(0, 1), batch_size=BATCH))[::2]
    for first, second in zip(batches[:8:2], batches[1:8:2], strict=True):
        inputs, targets = (torch.cat(pair) for pair in zip(first, second, strict=True))
        inner.zero_grad()
        (plain(inputs) - targets).square().mean().backward()
        inner.step()
    for ours, theirs in zip(module.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_several_steps_on_one_batch_count_it_each_time(tmp_path: Path) -> None:
    """Manual optimization with two steps a batch, as PPO's: each counts the samples of the batch."""
    reports, _ = fit(tmp_path, Module(steps=2))
    assert [report.samples for report in reports] == [2 * BATCH] * 4


def test_a_second_fit_clips_and_leaves_as_the_first(tmp_path: Path) -> None:
    """A notebook's cell that is run twice: gradient_clip_val still holds, and the peer leaves at the end."""
    _, strategy = fit(tmp_path, Module(), fits=2, gradient_clip_val=NORM)
    opt = strategy.optimizer
    assert opt.options.max_grad_norm == NORM
    with pytest.raises(Exception, match="was closed"):
        opt.step()


def test_accumulation_that_grows_in_lockstep_is_no_wrong_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GradientAccumulationScheduler in lockstep: steps count what they have, and nothing is told."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        reports, _ = fit(
            tmp_path,
            Module(),
            "step",
            max_steps=34,
            callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})],
        )
    assert [report.samples for report in reports] == [BATCH] * 32 + [2 * BATCH] * 2
    assert not caplog.records
