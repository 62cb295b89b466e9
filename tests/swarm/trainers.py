"""Real training processes for the swarm tests: they train a small model and tell what they averaged."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from p2pavg import CollaborativeOptimizer
from p2pavg.optim.updates.behind import BehindUpdate
from p2pavg.rounds.training import Average

DEADLINE_S = 100.0
BATCH = 4


class Attentive(nn.Module):
    """Reads 8 values as 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(1, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        tokens = self.read(values.unsqueeze(2))
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        found: torch.Tensor = self.out((tokens + mixed).mean(dim=1))
        return found


KEY_BIASES = slice(816, 832)
"""Where those of the attention stand among an Attentive's parameters."""


def net(attentive: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if attentive:
        return Attentive()
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def loss_of(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """The mean loss over the samples with these ids."""
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in ids]
    return model(torch.stack(rows)).square().sum(dim=1).mean()


def inner_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


@dataclass
class Job:
    """What one trainer does. seconds: the time of a microbatch, spent asleep."""

    rank: int
    optimizer: str = "sgd"
    attentive: bool = False
    codec: str = "none"
    target: int = 24
    epochs: int = 20
    seconds: float = 0.002
    run_id: str = "same-training"
    initial_peers: tuple[str, ...] = ()
    rates: bool = False  # the loop sets the learning rate by its own count of steps, and no scheduler does
    wait_for: int = 0  # others that must be in view before the first microbatch
    options: dict[str, Any] = field(default_factory=dict)


Counted = dict[int, list[tuple[int, list[int]]]]


@dataclass
class Outcome:
    """What a trainer ended with: its parameters, and which of its batches each epoch's average held.

    counted[epoch]: (epoch whose parameters it was computed on, sample ids); they differ when it was late.
    """

    params: np.ndarray
    counted: Counted
    late: int
    epoch: int


def train(job: Job, pipe: Connection) -> None:
    """The body of a trainer process."""
    torch.set_num_threads(1)
    model = net(job.attentive)
    inner = inner_of(job.optimizer, model)
    opt = CollaborativeOptimizer(
        inner,
        job.run_id,
        job.target,
        BATCH,
        initial_peers=job.initial_peers,
        scheduler=None if job.rates else CosineAnnealingLR(inner, 40),
        compression=job.codec,
        listen="127.0.0.1:0",
        **job.options,
    )
    pipe.send(opt.peer.address)
    pipe.recv()  # the others are there
    deadline = time.monotonic() + DEADLINE_S
    while len(opt.peers) < job.wait_for:
        if time.monotonic() > deadline:
            raise TimeoutError("the others were never seen")
        time.sleep(0.01)
    counted, late = (train_delayed if job.options.get("delay_updates") else train_waiting)(job, opt, model)
    pipe.send(Outcome(flat(model), counted, late, opt.epoch))
    pipe.recv()  # everybody finished
    opt.close()
    pipe.send("closed")


def train_waiting(job: Job, opt: CollaborativeOptimizer, model: nn.Module) -> tuple[Counted, int]:
    """Trains to the last epoch; what each epoch's average held of ours, and how often we were late."""
    counted: Counted = {}
    pending: list[tuple[int, list[int]]] = []
    late, drawn = 0, job.rank * 1_000_000
    while opt.epoch < job.epochs:
        batch = list(range(drawn, drawn + BATCH))
        drawn += BATCH
        time.sleep(job.seconds)
        if job.rates:
            opt.param_groups[0]["lr"] = 0.05 / (1 + drawn % 1_000_000)
        loss_of(model, batch).backward()
        epoch = opt.epoch
        pending.append((epoch, batch))
        opt.step()
        opt.zero_grad()
        if opt.epoch == epoch:
            continue
        if opt._training.samples():  # the round went on without us: what we have counts in the next one
            late += 1
        else:
            counted[epoch], pending = pending, []
    return counted, late


def train_delayed(job: Job, opt: CollaborativeOptimizer, model: nn.Module) -> tuple[Counted, int]:
    """Like `train_waiting`, with the sums of an epoch leaving before they are averaged."""
    update = opt._update
    assert isinstance(update, BehindUpdate)
    counted: Counted = {}
    pending: list[tuple[int, list[int]]] = []
    leaving: list[tuple[int, list[int]]] = []
    late, drawn = 0, job.rank * 1_000_000
    submit, finish = update._submit, update._finish

    def submitting(*arguments: Any) -> None:
        nonlocal pending, leaving
        leaving, pending = pending, []
        submit(*arguments)

    def finishing() -> Any:
        nonlocal pending, leaving, late
        outcome = finish()
        if isinstance(outcome, Average) and not outcome.late:
            counted[outcome.epoch] = leaving
        else:
            late += isinstance(outcome, Average)
            pending = leaving + pending
        leaving = []
        return outcome

    update._submit, update._finish = submitting, finishing  # type: ignore[method-assign]
    while opt.epoch < job.epochs:
        batch = list(range(drawn, drawn + BATCH))
        drawn += BATCH
        time.sleep(job.seconds)
        loss_of(model, batch).backward()
        pending.append((opt.epoch, batch))
        opt.step()
        opt.zero_grad()
    return counted, late


torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # the first optimizer of a process imports for seconds


def forking() -> multiprocessing.context.BaseContext:
    """Processes forked from one that has imported torch and p2pavg."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.swarm.trainers"])
    return context


class Trainers:
    """Starts trainer processes and talks to them; whatever is left is killed at the end."""

    def __init__(self) -> None:
        self._context = forking()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.addresses: list[str] = []

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)

    def start(self, job: Job) -> str:
        """Start one trainer; returns its address."""
        return self.launch(train, job)

    def launch(self, body: Callable[[Any, Connection], None], job: Any) -> str:
        """Start a process that runs `body(job, pipe)` and first tells its address; returns that."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=body, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)
        self.addresses.append(self.receive(len(self.pipes) - 1))
        return self.addresses[-1]

    def start_all(self, jobs: Sequence[Job]) -> None:
        """Start a swarm around the first job's trainer, and let all begin."""
        address = self.start(jobs[0])
        for job in jobs[1:]:
            job.initial_peers = (address,)
            self.start(job)
        for rank in range(len(jobs)):
            self.pipes[rank].send("go")

    def receive(self, rank: int, timeout: float = DEADLINE_S) -> Any:
        if not self.pipes[rank].poll(timeout):
            raise TimeoutError(f"trainer {rank} did not answer within {timeout:.0f} s")
        return self.pipes[rank].recv()

    def finish(self, ranks: Sequence[int]) -> list[Outcome]:
        """The outcomes of these trainers, which then close."""
        outcomes = [self.receive(rank) for rank in ranks]
        for rank in ranks:
            self.pipes[rank].send("done")
        for rank in ranks:
            assert self.receive(rank) == "closed"
        return outcomes
