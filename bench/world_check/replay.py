"""The same samples in one process: the run's own algorithm, and data-parallel training at equal tokens."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.world import model as world
from bench.world_check.data import consumed, index_of
from bench.world_check.logs import Run

OUTER_LR, MOMENTUM = 0.7, 0.9
Batch = list[int]
Vector = torch.Tensor


def values() -> int:
    """Parameters of the model."""
    return sum(param.numel() for param in world.build().parameters())


class Worker:
    """A model with an optimizer of its own."""

    def __init__(self) -> None:
        self.model = world.build()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=world.LEARNING_RATE)

    def train(self, batches: Iterable[Batch]) -> None:
        text = world.training()
        for batch in batches:
            part = text[batch]
            self.model(input_ids=part, labels=part).loss.backward()
            self.inner.step()
            self.inner.zero_grad()

    def take(self, theta: Vector) -> None:
        torch.nn.utils.vector_to_parameters(theta.clone(), self.model.parameters())

    def vector(self) -> Vector:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def _shares(run: Run) -> dict[int, dict[str, list[Batch]]]:
    """Epoch -> place -> the batches of its contribution to that average, in the order in which it trained."""
    seed, block = run.facts["seed"], run.facts["block"]
    wanted = {
        epoch: {index_of(number, at, seed, block) for number, at in pairs}
        for epoch, pairs in consumed(run).items()
    }
    shares: dict[int, dict[str, list[Batch]]] = defaultdict(lambda: defaultdict(list))
    for life in run.lives:
        for step in life.steps:
            # A step's samples are in the average under way, or in the next when it ended a step too late.
            for epoch in range(step["epoch"] - 1, step["epoch"] + 3):
                found = wanted.get(epoch, set()).intersection(step["indices"])
                if found:
                    shares[epoch][life.place].append(sorted(found, key=step["indices"].index))
                    wanted[epoch] -= found
                    break
    return shares


def replay_outer(run: Run) -> float:
    """The validation loss after the run's outer steps, made by one process in float32 on its samples."""
    theta, velocity = Worker().vector(), None
    workers: dict[str, Worker] = {}
    for _, by_place in sorted(_shares(run).items()):
        total, mean = 0, torch.zeros_like(theta)
        for place, batches in by_place.items():
            if place not in workers:  # a newcomer begins with a copy of a donor's inner state
                workers[place] = copy.deepcopy(next(iter(workers.values()))) if workers else Worker()
            worker, samples = workers[place], sum(map(len, batches))
            worker.take(theta)
            worker.train(batches)
            mean += samples * (theta - worker.vector())
            total += samples
        mean /= total
        velocity = mean.clone() if velocity is None else MOMENTUM * velocity + mean
        theta = theta - OUTER_LR * (mean + MOMENTUM * velocity)
    final = Worker()
    final.take(theta)
    return world.loss(final.model)


def data_parallel(run: Run) -> float:
    """The validation loss of one process that takes each step on a batch of every peer: as many tokens."""
    seed, block = run.facts["seed"], run.facts["block"]
    width = run.facts["batch"] * len(run.facts["places"])
    indices = [
        index_of(number, at, seed, block)
        for _, pairs in sorted(consumed(run).items())
        for number, at in pairs
    ]
    worker = Worker()
    worker.train(indices[at : at + width] for at in range(0, len(indices) - width + 1, width))
    return world.loss(worker.model)


def losses(folder: Path, run: Run) -> dict[str, Any]:
    """Validation losses in nats per byte: of what the peers ended with, and of the replays."""
    torch.set_num_threads(1)
    found = sorted(folder.glob("*.pt"))
    if not found:
        return {"loss": None}
    model = world.build()
    before = world.loss(model)
    model.load_state_dict(torch.load(found[0], weights_only=True))
    result: dict[str, Any] = {"loss_before": round(before, 4), "loss": round(world.loss(model), 4)}
    result["loss_of_data_parallel"] = round(data_parallel(run), 4)
    if not run.facts["gradients"]:
        result["loss_of_one_process"] = round(replay_outer(run), 4)
    return result
