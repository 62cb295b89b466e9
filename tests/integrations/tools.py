"""The same training by each tool, alone and as a peer: losses, learning rates, parameters."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from p2pavg import CollaborativeOptimizer, Peer
from tests.integrations.processes import BATCH, F32, STEPS, Meeting, bits, net, share

RATE = 1e-2
NORM = 0.5  # gradients of this model are longer
QUIET = {"compression": "none", "listen": "127.0.0.1:0"}


@dataclass
class Told:
    """What a training told: by optimizer step the loss and the learning rate it was made with, the
    parameters at its end, and how often it joined a run.
    """

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    params: F32 = field(default_factory=lambda: np.zeros(0, np.float32))
    joins: int = 0


class Joins:
    """Counts the times that this process joins a run."""

    def __init__(self) -> None:
        self.count = 0
        start = Peer.start

        def counted(peer: Peer) -> None:
            self.count += 1
            start(peer)

        Peer.start = counted  # type: ignore[method-assign]


def inner_of(
    model: nn.Module | list[nn.Parameter],
) -> tuple[torch.optim.Optimizer, CosineAnnealingLR]:
    inner = torch.optim.AdamW(model.parameters() if isinstance(model, nn.Module) else model, lr=RATE)
    return inner, CosineAnnealingLR(inner, STEPS)


def tensors(rank: int, peers: int) -> TensorDataset:
    inputs, targets = zip(*share(rank, peers), strict=True)
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


# ------------------------------------------------------------------------------------------ transformers


class ForTrainer(nn.Module):
    """As Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def trainer_args(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "max_grad_norm": NORM,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(str(folder), **settings | changes)


def rows(rank: int, peers: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in share(rank, peers)]


def trainer_alone(folder: Path, peers: int) -> Told:
    """Trainer in one process, with all peers' batches as one."""
    from transformers import Trainer

    model = ForTrainer()
    args = trainer_args(folder, per_device_train_batch_size=BATCH * peers)
    trainer = Trainer(model, args, train_dataset=rows(0, 1), optimizers=inner_of(model))
    trainer.train()
    return _of_trainer(trainer, model, 0)


def trainer_peer(rank: int, peers: int, meeting: Meeting, folder: Path, accumulate: int = 1) -> Told:
    """A peer of the same."""
    from transformers import Trainer

    from p2pavg.hf import trainer_kwargs

    joins = Joins()
    model = ForTrainer()
    inner, schedule = inner_of(model)
    with CollaborativeOptimizer(
        inner,
        "tools",
        "step",
        initial_peers=meeting.first(rank),
        scheduler=schedule,
        max_grad_norm=NORM,
        **QUIET,
    ) as opt:
        meeting.there(opt, peers - 1)
        args = trainer_args(
            folder, per_device_train_batch_size=BATCH // accumulate, gradient_accumulation_steps=accumulate
        )
        trainer = Trainer(model, train_dataset=rows(rank, peers), **trainer_kwargs(opt, args))
        meeting.together()
        trainer.train()
        meeting.together()
        return _of_trainer(trainer, model, joins.count)


def _of_trainer(trainer: Any, model: nn.Module, joins: int) -> Told:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, rates = [e["loss"] for e in logs], [e["learning_rate"] for e in logs]
    return Told(losses, rates, bits(model), joins)


# -------------------------------------------------------------------------------------------- accelerate


def accelerate_alone(folder: Path, peers: int) -> Told:
    """A plain loop with all peers' batches as one."""
    model = net()
    inner, schedule = inner_of(model)
    told = Told()
    whole = DataLoader(tensors(0, 1), batch_size=BATCH * peers)
    for inputs, targets in list(whole)[:STEPS]:
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        told.losses.append(float(loss.detach()))
        told.rates.append(inner.param_groups[0]["lr"])
        inner.step()
        schedule.step()
        inner.zero_grad()
    told.params = bits(model)
    return told


def accelerate_peer(rank: int, peers: int, meeting: Meeting, folder: Path, accumulate: int = 1) -> Told:
    """A peer: prepared, with Accelerate's accumulation."""
    from accelerate import Accelerator

    joins = Joins()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = net()
    inner, schedule = inner_of(model)
    opt = CollaborativeOptimizer(
        inner,
        "tools",
        "step",
        BATCH,
        initial_peers=meeting.first(rank),
        scheduler=schedule,
        max_grad_norm=NORM,
        **QUIET,
    )
    with opt:
        meeting.there(opt, peers - 1)
        loader = DataLoader(tensors(rank, peers), batch_size=BATCH // accumulate)
        model, prepared, loader = accelerator.prepare(model, opt, loader)
        meeting.together()
        told, sums = Told(), 0.0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                sums += float(loss.detach()) / accumulate
                rate = opt.param_groups[0]["lr"]
                prepared.step()
                prepared.zero_grad()
            if opt.stepped and accelerator.sync_gradients:
                told.losses.append(sums)
                told.rates.append(rate)
                sums = 0.0
            if opt.epoch == STEPS:
                break
        meeting.together()
        told.params, told.joins = bits(model), joins.count
        return told


# --------------------------------------------------------------------------------------------- Lightning


def _module(told: Told, meeting: Meeting | None, others: int, accumulate: int) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.sums = 0.0

        def on_train_start(self) -> None:
            if meeting is not None:
                meeting.there(self.trainer.strategy.optimizer, others)
                meeting.together()

        def on_train_end(self) -> None:
            told.params = bits(self)
            if meeting is not None:
                meeting.together()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            loss = (self.net(inputs) - targets).square().mean()
            self.sums += float(loss.detach()) / accumulate
            if index % accumulate == accumulate - 1:
                told.losses.append(self.sums)
                told.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
                self.sums = 0.0
            return loss

        def configure_optimizers(self) -> Any:
            inner, schedule = inner_of(self)
            return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def lightning_trainer(folder: Path, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "gradient_clip_val": NORM,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "default_root_dir": str(folder),
    }
    return Trainer(**quiet | settings)


def lightning_alone(folder: Path, peers: int) -> Told:
    """Lightning in one process, with all peers' batches as one."""
    told = Told()
    lightning_trainer(folder).fit(
        _module(told, None, 0, 1), DataLoader(tensors(0, 1), batch_size=BATCH * peers)
    )
    return told


def lightning_peer(rank: int, peers: int, meeting: Meeting, folder: Path, accumulate: int = 1) -> Told:
    """A peer of the same."""
    from p2pavg.lightning import CollaborativeStrategy

    joins, told = Joins(), Told()
    strategy = CollaborativeStrategy("tools", "step", initial_peers=meeting.first(rank), **QUIET)
    trainer = lightning_trainer(folder, strategy=strategy, accumulate_grad_batches=accumulate)
    loader = DataLoader(tensors(rank, peers), batch_size=BATCH // accumulate)
    trainer.fit(_module(told, meeting, peers - 1, accumulate), loader)
    told.joins = joins.count
    return told
