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
from torch.utils.data import DataLoader, IterableDataset

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


def test_a_stream_of_data_is_no_wrong_setting(
    opt: CollaborativeOptimizer, model: ForTrainer, tmp_path: Path
) -> None:
    """Data without a length, as an IterableDataset's, train to the last epoch."""
    pytest.importorskip("transformers")
    from transformers import Trainer

    from p2pavg.hf import trainer_kwargs

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from rows(0, 1)

    settings = trainer_args(tmp_path, max_steps=2, lr_scheduler_type="constant")
    Trainer(model=model, train_dataset=Stream(), **trainer_kwargs(opt, settings)).train()
    assert opt.epoch == 2


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


class Loop:
    """A loop of Accelerate's: the model, the prepared optimizer, and a backward pass of one batch."""

    def __init__(self, opt: CollaborativeOptimizer, model: ForTrainer, *more: Any, **settings: Any) -> None:
        accelerate = pytest.importorskip("accelerate")
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        peer = opt.peer
        self.model, self.optimizer, *self.more = self.accelerator.prepare(model, opt, *more)
        assert opt.peer is peer  # prepare() loads the state at which the peer stands

    def backward(self) -> None:
        row = rows(0, 1)[0]
        self.accelerator.backward(self.model(row["x"], row["labels"])["loss"])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.optimizer.step()


def clipped_by_norm(loop: Loop) -> None:
    loop.steps(1)
    loop.backward()
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf"))  # for a log: no clipping
    loop.optimizer.step()
    loop.backward()
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizer.step()


def clipped_by_value(loop: Loop) -> None:
    for _ in range(3):  # within the first epoch
        loop.backward()
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 1e-3)
        loop.optimizer.step()


def accumulated_untold(loop: Loop) -> None:
    for _ in range(2):
        loop.backward()
    loop.optimizer.step()


def cleared(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.zero_grad()


def unscaled(loop: Loop) -> None:
    loop.accelerator.scaler = loop.optimizer.scaler = torch.amp.GradScaler("cpu")
    optimizer = loop.optimizer.optimizer
    loop.accelerator.scaler.scale(loop.model(rows(0, 1)[0]["x"], rows(0, 1)[0]["labels"])["loss"]).backward()
    loop.accelerator.scaler.unscale_(optimizer)
    loop.accelerator.scaler.step(optimizer)


def wrapped_twice(loop: Loop) -> None:
    inner = loop.accelerator.prepare(torch.optim.SGD(net().parameters(), lr=0.1))
    CollaborativeOptimizer(inner, "wrong", 16, initial_peers=[], **QUIET)


def shared_with_another(loop: Loop) -> None:
    CollaborativeOptimizer(
        torch.optim.SGD(loop.model.parameters(), lr=0.1), "other", 16, initial_peers=[], **QUIET
    )


@pytest.mark.parametrize("opt", [{"batch_size_per_step": 4}], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (clipped_by_norm, "max_grad_norm="),
        (clipped_by_value, "max_grad_norm="),
        (accumulated_untold, "samples_per_step"),
        (cleared, r"zero_grad\(\) after a backward\(\) without step\(\)"),
        (unscaled, r"scaler\.unscale_\(opt\)"),
        (wrapped_twice, r"hand the result to accelerator\.prepare"),
        (shared_with_another, r"close\(\) that optimizer first"),
    ],
)
def test_accelerate_loops_are_refused(
    opt: CollaborativeOptimizer, model: ForTrainer, wrong: Any, words: str
) -> None:
    """A loop with Accelerate that would train something else gets one sentence with what to do."""
    loop = Loop(opt, model)
    with pytest.raises(ConfigurationError, match=words):
        wrong(loop)
    if opt._flat.pending:
        opt.discard()


@pytest.mark.parametrize("opt", [{"batch_size_per_step": 4, "scheduler": None}], indirect=True)
def test_accelerates_scheduler_that_runs_ahead_is_told(
    opt: CollaborativeOptimizer, model: ForTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """A prepared schedule steps at every batch, and an epoch has four: one warning that names scheduler=."""
    loop = Loop(opt, model, CosineAnnealingLR(opt.inner, 64))
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        for _ in range(8):
            loop.steps(1)
            loop.more[0].step()
    assert caplog.text.count("pass the schedule as scheduler=") == 1


@pytest.mark.parametrize("opt", [{"batch_size_per_step": 4}], indirect=True)
def test_accelerates_scheduler_beside_the_swarms_is_told(
    opt: CollaborativeOptimizer, model: ForTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule of the swarm in prepare(): two hands step it, and one warning says so."""
    loop = Loop(opt, model, opt.options.scheduler)
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        for _ in range(8):
            loop.steps(1)
            loop.more[0].step()
    assert caplog.text.count("take its step() out of the loop") == 1


def test_accelerates_rest_of_the_data_is_told(
    opt: CollaborativeOptimizer, model: ForTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Three batches, two a step: Accelerate steps on the last one alone, and one warning says so."""
    loop = Loop(opt, model, DataLoader(tensors(0, 1), batch_size=43), gradient_accumulation_steps=2)
    opt.samples_per_step = 2
    with caplog.at_level(logging.WARNING, "p2pavg.optim"):
        for _ in range(2):
            for inputs, targets in loop.more[0]:
                with loop.accelerator.accumulate(loop.model):
                    loop.accelerator.backward(loop.model(inputs, targets)["loss"])
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
    assert caplog.text.count("pass step(batch_size=n)") == 1


def test_accelerates_processes_are_not_a_peer_each(
    opt: CollaborativeOptimizer, model: ForTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `accelerate launch` with two processes, prepare() wraps the model in DistributedDataParallel:
    step() names node_group=.
    """
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        monkeypatch.setattr(distributed, "get_world_size", lambda *_: 2)
        row = rows(0, 1)[0]
        wrapped(row["x"], row["labels"])["loss"].backward()
        with pytest.raises(ConfigurationError, match="node_group="):
            opt.step(batch_size=4)
    finally:
        monkeypatch.undo()
        del wrapped
        distributed.destroy_process_group()
    opt.discard()


# --------------------------------------------------------------------------------------------- Lightning


def fit(configure: Any, trainer: dict[str, Any], options: dict[str, Any], batch: int, folder: Path) -> None:
    from lightning.pytorch import LightningModule, callbacks

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
    arguments = {"StochasticWeightAveraging": [0.1], "GradientAccumulationScheduler": [{0: 1, 1: 2}]}
    named = trainer.get("callbacks", [])
    started = [getattr(callbacks, name)(*arguments.get(name, [])) for name in named]
    made = lightning_trainer(folder, strategy=strategy, **trainer | {"callbacks": started})
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
        (plain, {"callbacks": ["StochasticWeightAveraging"]}, {}, 4, "EMAWeightAveraging"),
        (plain, {"callbacks": ["LearningRateFinder"]}, {}, 4, "rates that are too high"),
        (
            plain,
            {"callbacks": ["GradientAccumulationScheduler"], "max_steps": 40},
            {},
            4,
            "had 1 batches and",
        ),
        (lambda model: None, {}, {}, 4, "the optimizer has no parameters"),
    ],
)
def test_lightning_settings_are_refused(
    configure: Any, trainer: dict[str, Any], options: dict[str, Any], batch: int, words: str, tmp_path: Path
) -> None:
    """fit() raises one sentence that says what to change, within the first pass over the data."""
    pytest.importorskip("lightning")
    with pytest.raises(ConfigurationError, match=words):
        fit(configure, trainer, options, batch, tmp_path)


def test_lightning_that_ends_by_its_own_passes_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """max_epochs= without max_steps= draws one warning; none in lockstep, where a peer may count itself."""
    pytest.importorskip("lightning")
    for target, warnings in (("step", 0), (16, 1)):
        with caplog.at_level(logging.WARNING, "p2pavg.lightning"):
            fit(plain, {"max_steps": -1, "max_epochs": 1}, {"target_batch_size": target}, 4, tmp_path)
        assert caplog.text.count("pass max_steps=") == warnings
