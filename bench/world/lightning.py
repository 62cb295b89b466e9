"""A peer of the run: Lightning's Trainer as it is, on what a SwarmSampler draws.

Its one argument is a JSON object, made by `run`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from bench.world import model as world
from bench.world.log import Log
from bench.world.trainer import ENDLESS, Drawn, options
from p2pavg import SwarmSampler
from p2pavg.lightning import CollaborativeStrategy


class Bytes(pl.LightningModule):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = world.build()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=world.LEARNING_RATE)


class Watch(pl.Callback):
    """Paces the steps, and writes them down."""

    def __init__(self, log: Log, theta: str) -> None:
        self._log, self._theta, self._made, self._began = log, theta, time.monotonic(), 0.0
        self._taken: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._log.begin(trainer.strategy.optimizer, time.monotonic() - self._made)

    def on_train_batch_start(self, *_: Any) -> None:
        self._log.wait_for_pace()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._taken = self._log.taken()
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        seconds, opt = time.monotonic() - self._began, trainer.strategy.optimizer
        if self._log.stepped(opt, pl_module.net, self._taken, seconds):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._log.end(trainer.strategy.optimizer, pl_module.net, self._theta)


def main() -> None:
    """Join, train until told to end, leave θ_ref behind."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    log = Log(config["log"], config["pace_s"])
    sampler = SwarmSampler(world.SAMPLES, seed=config["seed"], block=config["block"], endless=True)
    strategy = CollaborativeStrategy(config["run_id"], config["target"], sampler=sampler, **options(config))
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=ENDLESS,
        callbacks=[Watch(log, config["theta"])],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Bytes(), DataLoader(Drawn(sampler, log), batch_size=world.BATCH, drop_last=True))


if __name__ == "__main__":
    main()
