"""Ten settings of each tool that would train something else: ten sentences with what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from p2pavg import CollaborativeOptimizer
from p2pavg.errors import ConfigurationError
from tests.integrations.processes import net
from tests.integrations.tools import NORM, QUIET, ForTrainer, inner_of, rows, tensors, trainer_args

pytestmark = pytest.mark.swarm


@pytest.fixture
def model() -> ForTrainer:
    return ForTrainer()


@pytest.fixture
def opt(model: ForTrainer, request: pytest.FixtureRequest) -> Iterator[CollaborativeOptimizer]:
    inner, schedule = inner_of(model)
    options = {"scheduler": schedule, "max_grad_norm": NORM, **getattr(request, "param", {})}
    made = CollaborativeOptimizer(inner, "wrong", 16, initial_peers=[], **options, **QUIET)
    yield made
    made.close(0.0)


# ------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": -1, "num_train_epochs": 3}, "max_steps="),
        ({"max_grad_norm": 1.0}, "pass max_grad_norm=1.0 to CollaborativeOptimizer"),
        ({"fsdp": "full_shard"}, "leave fsdp= and deepspeed= out"),
        ({"deepspeed": {"train_batch_size": 4}}, "leave fsdp= and deepspeed= out"),
        ({"world_size": 2}, "without torchrun"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 8}, "target_batch_size=16 is below the 32 samples"),
    ],
)
def test_trainer_settings_are_refused_at_once(
    opt: CollaborativeOptimizer, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """trainer_kwargs() raises one sentence that says what to change, before a Trainer is built."""
    pytest.importorskip("transformers")
    from p2pavg.hf import trainer_kwargs

    class Args:  # as TrainingArguments of a machine that has what these settings ask for
        def __init__(self) -> None:
            self.__dict__.update(vars(trainer_args(tmp_path)))
            self.train_batch_size, self.world_size = 4, 1
            self.__dict__.update(settings)

    with pytest.raises(ConfigurationError, match=words):
        trainer_kwargs(opt, Args())  # type: ignore[arg-type]


@pytest.mark.parametrize("opt", [{"batch_size_per_step": 3}], indirect=True)
def test_trainer_is_told_another_batch(opt: CollaborativeOptimizer, tmp_path: Path) -> None:
    """batch_size_per_step that is neither a batch's nor a step's is named."""
    pytest.importorskip("transformers")
    from p2pavg.hf import trainer_kwargs

    with pytest.raises(ConfigurationError, match="leave batch_size_per_step out"):
        trainer_kwargs(opt, trainer_args(tmp_path))


@pytest.mark.parametrize("opt", [{"scheduler": None}], indirect=True)
def test_trainer_without_its_schedule_is_told(
    opt: CollaborativeOptimizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule of TrainingArguments that nobody steps draws a warning that names scheduler=."""
    pytest.importorskip("transformers")
    from p2pavg.hf import trainer_kwargs

    with caplog.at_level(logging.WARNING, "p2pavg.hf"):
        trainer_kwargs(opt, trainer_args(tmp_path))
    assert "scheduler=get_scheduler" in caplog.text


def test_trainer_of_another_model_is_refused(opt: CollaborativeOptimizer, tmp_path: Path) -> None:
    """Parameters that the optimizer does not hold stop the training at its begin."""
    transformers = pytest.importorskip("transformers")
    from p2pavg.hf import trainer_kwargs

    trainer = transformers.Trainer(
        ForTrainer(), train_dataset=rows(0, 1), **trainer_kwargs(opt, trainer_args(tmp_path))
    )
    with pytest.raises(ConfigurationError, match="this very model"):
        trainer.train()


def test_trainer_with_less_data_than_a_step_is_refused(
    opt: CollaborativeOptimizer, model: ForTrainer, tmp_path: Path
) -> None:
    """Data that fill no step stop the training at its begin."""
    transformers = pytest.importorskip("transformers")
    from p2pavg.hf import trainer_kwargs

    args = trainer_args(tmp_path, gradient_accumulation_steps=4)
    trainer = transformers.Trainer(model, train_dataset=rows(0, 1)[:12], **trainer_kwargs(opt, args))
    with pytest.raises(ConfigurationError, match="3 batches, and a step takes 4"):
        trainer.train()


@pytest.mark.parametrize("opt", [{"scheduler": None, "max_grad_norm": None}], indirect=True)
def test_trainer_as_it_is_stops_within_the_first_epoch(
    opt: CollaborativeOptimizer, model: ForTrainer, tmp_path: Path
) -> None:
    """`optimizers=(opt, schedule)` and Trainer's own clipping: a sentence that names max_grad_norm=."""
    transformers = pytest.importorskip("transformers")
    opt.samples_per_step = 4
    schedule = CosineAnnealingLR(opt, 8)
    trainer = transformers.Trainer(
        model, trainer_args(tmp_path), train_dataset=rows(0, 1), optimizers=(opt, schedule)
    )
    with pytest.raises(ConfigurationError, match="max_grad_norm="):
        trainer.train()
    assert opt.epoch == 0


# -------------------------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize("opt", [{"batch_size_per_step": 4}], indirect=True)
def test_accelerates_clipping_and_accumulation_are_named(
    opt: CollaborativeOptimizer, model: ForTrainer
) -> None:
    """clip_grad_norm_ of sums, and several backward() whose samples nobody told, are errors with the fix."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    peer = opt.peer
    model, prepared = accelerator.prepare(model, opt)
    assert opt.peer is peer  # prepare() loads the state at which the peer stands
    row = rows(0, 1)[0]
    loss = model(row["x"], row["labels"])["loss"]
    accelerator.backward(loss)
    prepared.step()
    accelerator.backward(model(row["x"], row["labels"])["loss"])
    accelerator.clip_grad_norm_(model.parameters(), float("inf"))  # for a log: no clipping
    prepared.step()
    accelerator.backward(model(row["x"], row["labels"])["loss"])
    accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigurationError, match="max_grad_norm="):
        prepared.step()
    opt.discard()
    for _ in range(2):
        accelerator.backward(model(row["x"], row["labels"])["loss"])
    with pytest.raises(ConfigurationError, match="samples_per_step"):
        prepared.step()


def test_accelerates_wrapper_is_not_wrapped() -> None:
    """An AcceleratedOptimizer inside is refused by its name, with the right order."""
    accelerate = pytest.importorskip("accelerate")
    inner = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"hand the result to accelerator\.prepare"):
        CollaborativeOptimizer(inner, "wrong", 16, initial_peers=[], **QUIET)


# --------------------------------------------------------------------------------------------- Lightning


def fit(configure: Any, trainer: dict[str, Any], options: dict[str, Any], batch: int, folder: Path) -> None:
    from lightning.pytorch import LightningModule

    from p2pavg.lightning import CollaborativeStrategy
    from tests.integrations.tools import lightning_trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.automatic_optimization = configure is not two

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            found: torch.Tensor = (self.net(batch[0]) - batch[1]).square().mean()
            return found

        def configure_optimizers(self) -> Any:
            return configure(self.net)

    strategy = CollaborativeStrategy(
        "wrong", **{"target_batch_size": 16, "initial_peers": []} | options | QUIET
    )
    made = lightning_trainer(folder, strategy=strategy, **trainer)
    made.fit(Module(), DataLoader(tensors(0, 1), batch_size=batch))


def plain(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two(model: nn.Module) -> Any:
    return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]  # type: ignore[index]


def scheduled(interval: str, kind: Any = CosineAnnealingLR) -> Any:
    def configure(model: nn.Module) -> Any:
        inner = plain(model)
        schedule = kind(inner, 8) if kind is CosineAnnealingLR else kind(inner)
        told = {"scheduler": schedule, "interval": interval, "monitor": "loss"}
        return {"optimizer": inner, "lr_scheduler": told}

    return configure


@pytest.mark.parametrize(
    ("configure", "trainer", "options", "batch", "words"),
    [
        (two, {"gradient_clip_val": None}, {}, 4, "a run id each"),
        (scheduled("epoch"), {}, {}, 4, '"interval": "step"'),
        (scheduled("step", ReduceLROnPlateau), {}, {}, 4, "ReduceLROnPlateau needs a metric"),
        (plain, {"gradient_clip_algorithm": "value"}, {}, 4, "clip by norm"),
        (plain, {"gradient_clip_val": 2.0}, {"max_grad_norm": 1.0}, 4, "give one of them"),
        (plain, {}, {}, 5, "drop_last=True"),
        (plain, {}, {}, 32, "target_batch_size=16 is below the 32 samples"),
        (plain, {"accumulate_grad_batches": 8}, {}, 4, "below the 32 samples"),
        (plain, {}, {"target_batch_size": "epoch"}, 4, '"step"'),
        (plain, {}, {"target_batch_size": "step", "delay_updates": True}, 4, "delay_updates"),
    ],
)
def test_lightning_settings_are_refused(
    configure: Any, trainer: dict[str, Any], options: dict[str, Any], batch: int, words: str, tmp_path: Path
) -> None:
    """fit() raises one sentence that says what to change, within the first pass over the data."""
    pytest.importorskip("lightning")
    with pytest.raises(ConfigurationError, match=words):
        fit(configure, trainer, options, batch, tmp_path)
