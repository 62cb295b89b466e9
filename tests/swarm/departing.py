"""Real processes that join a run and leave it, and account for every sample."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.report import RoundReport

DEADLINE_S = 100.0


@dataclass
class Plan:
    """What a process does. leaves: how often it joins, trains a little and leaves; 0: it stays until told."""

    run_id: str
    target: int = 96
    leaves: int = 0
    seconds: float = 0.002
    initial_peers: tuple[str, ...] = ()
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Account:
    """What became of a process's samples. averaged: all peers' samples by epoch, as its reports say."""

    produced: int = 0
    averaged: dict[int, int] = field(default_factory=dict)
    discarded: int = 0
    why: list[str] = field(default_factory=list)
    weight: float = 0.0  # of the model: it falls by 1 per epoch, whoever's samples were averaged
    epoch: int = 0
    threads: list[str] = field(default_factory=list)  # left over after close()
    sockets: int = 0
    files: list[str] = field(default_factory=list)

    def add(self, report: RoundReport) -> None:
        """Count what was discarded."""
        self.discarded += report.samples_discarded
        self.why += report.discarded_why

    def left(self, opt: CollaborativeOptimizer) -> None:
        """Count what was lost by leaving."""
        report = opt.last_report
        if report is not None and not report.members:
            self.add(report)


def build(plan: Plan, account: Account) -> tuple[CollaborativeOptimizer, nn.Module]:
    """The gradient of every sample is 1, so every average has to be 1."""
    torch.set_num_threads(1)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def on_round(report: RoundReport) -> None:
        account.add(report)
        account.averaged[report.epoch] = report.samples

    opt = CollaborativeOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan.run_id,
        plan.target,
        initial_peers=plan.initial_peers,
        compression="none",
        listen="127.0.0.1:0",
        on_round=on_round,
        **plan.options,
    )
    return opt, model


def step(
    plan: Plan, account: Account, opt: CollaborativeOptimizer, model: nn.Module, samples: int = 4
) -> None:
    """One microbatch."""
    time.sleep(plan.seconds)
    loss = model(torch.ones(samples, 1)).mean()
    opt.scale_loss(loss, samples).backward()
    account.produced += samples
    opt.step(batch_size=samples)


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def stay(plan: Plan, pipe: Connection) -> None:
    """Train until told to stop, then leave."""
    account = Account()
    with tempfile.TemporaryDirectory() as temporary:
        tempfile.tempdir = temporary
        before = sockets()
        opt, model = build(plan, account)
        pipe.send(opt.peer.address)
        while not pipe.poll(0):
            step(plan, account, opt, model)
        pipe.recv()
        opt.close()
        account.left(opt)
        account.epoch, account.weight = opt.epoch, float(model.weight.detach())
        account.threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        account.sockets = sockets() - before
        account.files = os.listdir(temporary)
    pipe.send(account)


def come_and_go(plan: Plan, pipe: Connection) -> None:
    """Join, train a little, leave, again and again."""
    dice = random.Random(plan.seed)
    account = Account()
    pipe.send("here")
    for _ in range(plan.leaves):
        opt, model = build(plan, account)
        for _ in range(dice.randint(1, 12)):
            step(plan, account, opt, model, dice.randint(1, 4))
        opt.close()
        account.left(opt)
    pipe.send(account)


def train_until_terminated(plan: Plan, pipe: Connection) -> None:
    """Train, and tell so after one step; SIGTERM ends it. The finally clause runs: it sends the account."""
    account = Account()
    opt, model = build(plan, account)
    pipe.send(opt.peer.address)
    try:
        step(plan, account, opt, model)
        pipe.send("trains")
        while True:
            step(plan, account, opt, model)
    finally:
        account.left(opt)
        pipe.send(account)


def train_until_interrupted(plan: Plan, pipe: Connection) -> None:
    """Train as the README's script; Ctrl-C strikes within the backward() of the fifth step."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    account = Account()
    opt, model = build(plan, account)
    pipe.send(opt.peer.address)
    steps = 0

    def strike(grad: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)

    model.weight.register_hook(strike)
    try:
        with opt:
            while True:
                step(plan, account, opt, model)
    finally:
        account.left(opt)
        pipe.send(account)
