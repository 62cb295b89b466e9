"""A peer of the run: transformers' Trainer as it is, on what a SwarmSampler draws.

Its one argument is a JSON object, made by `run`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.world import model as world
from bench.world import who
from bench.world.log import Log
from p2pavg import CollaborativeOptimizer, Outer, SwarmSampler
from p2pavg.hf import trainer_kwargs

ENDLESS = 1 << 20


class Drawn(IterableDataset[dict[str, Any]]):
    """Samples in the order in which the swarm's sampler gives them out."""

    def __init__(self, sampler: SwarmSampler, log: Log) -> None:
        self._sampler, self._log, self._text = sampler, log, world.training()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self._sampler:
            self._log.drawn.append(index)
            yield {"input_ids": self._text[index], "labels": self._text[index]}


class Watch(TrainerCallback):
    """Paces the steps, and writes them down."""

    def __init__(self, opt: CollaborativeOptimizer, log: Log) -> None:
        self._opt, self._log, self._began = opt, log, 0.0
        self._taken: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._log.wait_for_pace()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._taken = self._log.taken()
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.monotonic() - self._began
        if self._log.stepped(self._opt, kwargs["model"], self._taken, seconds):
            control.should_training_stop = True


def options(config: dict[str, Any]) -> dict[str, Any]:
    """What a peer tells CollaborativeOptimizer, whichever tool trains."""
    outer = {} if config["gradients"] else {"outer": Outer(lr=0.7, momentum=0.9, overlap=who.OVERLAP)}
    return {
        "initial_peers": config["initial_peers"],
        "listen": config["listen"],
        "region": config["region"],
        "name": config["name"],
        "credentials": config["credentials"],
        "compression": "fp16" if config["gradients"] else "int4",
        "plan": "flat" if config["gradients"] else "two-level",
        "checkpoint_dir": config["checkpoints"],
        "checkpoint_epochs": 2,
        "leave_notice_s": 10,
        **outer,
    }


def main() -> None:
    """Join, train until told to end, leave θ_ref behind."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    log = Log(config["log"], config["pace_s"])
    model = world.build()
    sampler = SwarmSampler(world.SAMPLES, seed=config["seed"], block=config["block"], endless=True)
    inner = torch.optim.AdamW(model.parameters(), lr=world.LEARNING_RATE)
    began = time.monotonic()
    with CollaborativeOptimizer(
        inner, config["run_id"], config["target"], sampler=sampler, **options(config)
    ) as opt:
        log.begin(opt, time.monotonic() - began)
        settings = TrainingArguments(
            config["output"],
            max_steps=ENDLESS,
            per_device_train_batch_size=world.BATCH,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            accelerator_config={"dispatch_batches": False},
        )
        kwargs = trainer_kwargs(opt, settings)
        callbacks = [*kwargs.pop("callbacks"), Watch(opt, log)]
        trainer = Trainer(model=model, train_dataset=Drawn(sampler, log), callbacks=callbacks, **kwargs)
        trainer.train()
        log.end(opt, model, config["theta"])


if __name__ == "__main__":
    main()
