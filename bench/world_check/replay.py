"""The same samples in one process: the run's own algorithm, and data-parallel training at equal tokens."""

from __future__ import annotations

import copy
import platform
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.world import model as world
from bench.world_check.data import consumed, index_of
from bench.world_check.logs import Run

OUTER_LR, MOMENTUM = 0.7, 0.9
MOVED = 1e-4  # of each first weight: less than what a codec adds
Batch = list[int]
Vector = torch.Tensor


def values() -> int:
    """Parameters of the model."""
    return sum(param.numel() for param in world.build().parameters())


class Worker:
    """A model with an optimizer of its own."""

    def __init__(self) -> None:
        self.model = world.build()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=world.LEARNING_RATE, fused=True)
        self.handed_in = self.vector()  # its parameters when it took part in its last average
        self.took_part = -1  # in that epoch

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


@dataclass
class Share:
    """A place's contribution to one average: its batches in the order in which it trained."""

    early: list[Batch] = field(default_factory=list)  # while the round before was under way
    later: list[Batch] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(map(len, (*self.early, *self.later)))


def _shares(run: Run) -> dict[int, dict[str, Share]]:
    """Epoch -> place -> what it contributed to that average."""
    seed, block = run.facts["seed"], run.facts["block"]
    wanted = {
        epoch: {index_of(number, at, seed, block) for number, at in pairs}
        for epoch, pairs in consumed(run).items()
    }
    shares: dict[int, dict[str, Share]] = defaultdict(lambda: defaultdict(Share))
    for life in run.lives:
        known = -1 if life.up is None else life.up["epoch"]
        for step in life.steps:
            before, known = known, step["epoch"]  # an average comes at the end of a step
            # A step's samples are in the average under way, or in the next when it ended a step too late.
            for epoch in range(step["epoch"] - 1, step["epoch"] + 3):
                found = wanted.get(epoch, set()).intersection(step["indices"])
                if found:
                    share = shares[epoch][life.place]
                    batches = share.early if before < epoch else share.later
                    batches.append(sorted(found, key=step["indices"].index))
                    wanted[epoch] -= found
                    break
    return shares


def replay_outer(run: Run, moved: float = 0.0) -> float:
    """The validation loss after the run's outer steps, made by one process in float32 on its samples.

    moved: relative change of the first weights, at random, which tells how far apart two such processes end.
    """
    theta, velocity = Worker().vector(), None
    theta *= 1 + moved * torch.randn(theta.shape, generator=torch.Generator().manual_seed(0))
    workers: dict[str, Worker] = {}
    for epoch, by_place in sorted(_shares(run).items()):
        total, mean = 0, torch.zeros_like(theta)
        for place, share in by_place.items():
            if place not in workers:  # a newcomer begins with a copy of a donor's inner state
                workers[place] = copy.deepcopy(next(iter(workers.values()))) if workers else Worker()
            worker = workers[place]
            if worker.took_part == epoch - 1:
                worker.train(share.early)
                worker.take(theta + worker.vector() - worker.handed_in)
            else:  # its parameters are the swarm's
                worker.take(theta)
                worker.train(share.early)
            worker.train(share.later)
            worker.handed_in, worker.took_part = worker.vector(), epoch
            mean += share.samples * (theta - worker.handed_in)
            total += share.samples
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
    found = sorted(folder.glob("*.pt"))
    if not found:
        return {"loss": None}
    if run.facts["python"] != platform.python_version():  # whose standard library is the text
        return {"loss": None, "loss_untold": f"the run's text is that of Python {run.facts['python']}"}
    model = world.build()
    before = world.loss(model)
    model.load_state_dict(torch.load(found[0], weights_only=True))
    result: dict[str, Any] = {"loss_before": round(before, 4), "loss": round(world.loss(model), 4)}
    replays = {"loss_of_data_parallel": partial(data_parallel, run)}
    if not run.facts["gradients"]:
        replays["loss_of_one_process"] = partial(replay_outer, run)
        replays["loss_of_one_process_moved"] = partial(replay_outer, run, MOVED)
    single = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=single) as pool:
        waiting = {name: pool.submit(replay) for name, replay in replays.items()}
        return result | {name: round(each.result(), 4) for name, each in waiting.items()}
