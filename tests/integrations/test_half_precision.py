"""fp16 with a GradScaler, in Trainer and Lightning: the same training as the tool alone, and an inf in it.

Both tools refuse fp16 without an accelerator, so scaler and precision are put in where they would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from p2pavg import CollaborativeOptimizer
from tests.integrations.processes import BATCH, STEPS, bits, net
from tests.integrations.tools import (
    NORM,
    QUIET,
    ForTrainer,
    inner_of,
    lightning_trainer,
    rows,
    tensors,
    trainer_args,
)

pytestmark = pytest.mark.swarm

SPOILED = 3  # the step in which a loss is inf


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


class Spoiled(ForTrainer):
    """One of its losses is inf, and its gradients with it."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self._at, self._calls = at, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        if self._calls == self._at:
            found["loss"] = found["loss"] * torch.inf
        self._calls += 1
        return found


def with_trainer(folder: Path, *, swarm: bool, spoiled: int | None) -> tuple[list[float], Any]:
    """Losses, and the parameters at the end."""
    from transformers import Trainer

    from p2pavg.hf import trainer_kwargs

    model = Spoiled(spoiled)
    inner, schedule = inner_of(model)
    args = trainer_args(folder)

    def train(**settings: Any) -> list[float]:
        trainer = Trainer(model, train_dataset=rows(0, 1), **settings)
        accelerator = trainer.accelerator
        accelerator.native_amp, accelerator.scaler = True, scaler()
        accelerator.state._mixed_precision = "fp16"
        try:
            trainer.train()
        finally:
            accelerator.state._mixed_precision = "no"  # one object for all of a process
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    if not swarm:
        return train(args=args, optimizers=(inner, schedule)), bits(model)
    with CollaborativeOptimizer(
        inner, "fp16", BATCH, initial_peers=[], scheduler=schedule, max_grad_norm=NORM, **QUIET
    ) as opt:
        losses = train(**trainer_kwargs(opt, args))
        assert opt.epoch == STEPS
        return losses, bits(model)


def test_trainer_in_fp16_trains_as_alone(tmp_path: Path) -> None:
    """Trainer unscales gradients to tell their norm; the losses, clipping and parameters are those of Trainer
    without the swarm.
    """
    pytest.importorskip("transformers")
    alone, theirs = with_trainer(tmp_path, swarm=False, spoiled=None)
    losses, ours = with_trainer(tmp_path, swarm=True, spoiled=None)
    assert len(alone) == STEPS
    assert losses == pytest.approx(alone, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_inf_in_trainer_costs_one_step(tmp_path: Path) -> None:
    """What overflowed is dropped, and training goes on to the last epoch with finite parameters."""
    pytest.importorskip("transformers")
    losses, params = with_trainer(tmp_path, swarm=True, spoiled=SPOILED)
    assert np.isfinite(params).all()
    assert not np.array_equal(params, bits(net()))
    assert np.isfinite(losses[-1])


def with_lightning(folder: Path, *, swarm: bool) -> tuple[list[float], Any]:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins import MixedPrecision

    from p2pavg.lightning import CollaborativeStrategy

    losses: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.kept: Any = None

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            found = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])
            losses.append(float(found.detach()))
            return found

        def on_train_end(self) -> None:
            self.kept = bits(self)

        def configure_optimizers(self) -> Any:
            inner, schedule = inner_of(self)
            return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    precision = MixedPrecision("16-mixed", "cpu", scaler())
    settings: dict[str, Any] = {"plugins": [precision], "gradient_clip_val": None}
    if swarm:
        settings["strategy"] = CollaborativeStrategy("fp16", BATCH, initial_peers=[], **QUIET)
    module = Module()
    lightning_trainer(folder, **settings).fit(module, DataLoader(tensors(0, 1), batch_size=BATCH))
    return losses, module.kept


def test_lightning_in_fp16_trains_as_alone(tmp_path: Path) -> None:
    """16-mixed with its scaler: losses and parameters of Lightning without the swarm."""
    pytest.importorskip("lightning")
    alone, theirs = with_lightning(tmp_path, swarm=False)
    losses, ours = with_lightning(tmp_path, swarm=True)
    assert len(alone) == STEPS
    assert losses == pytest.approx(alone, rel=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
