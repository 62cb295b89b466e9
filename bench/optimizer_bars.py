"""Bars of the optimizer on one CPU. `python -m bench.optimizer_bars --json PATH [--only step swap ...]`.

tasks: two real tasks trained with updates delayed by a whole epoch, from the second epoch on and from a
quarter of the run on, beside five synchronous seeds.
step: AdamW on offloaded masters, beside what 28 bytes per parameter take at the copy rate; one thread.
swap: the masters' way into the model at a step(), beside one copy of the same bytes.
link: two peers on an emulated link whose averaging takes 0.8 of the calculation: epochs with and without
delay, with peers that sleep instead of computing, and with torch computing on both cores.

A section that is not measured now stays in PATH as it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.bench.machine import environment
from p2pavg.optim.gradients.layout import exchange_layout
from p2pavg.optim.updates.masters import Masters

MICROBATCHES = 4  # per epoch
LINK = "six-100ms"
STEP_BYTES = 28  # per parameter: gradient, parameter and two moments read, the latter three written


@dataclass
class Task:
    """A model and its data. batch(generator) -> inputs and targets; validation: the same, fixed."""

    make: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], tuple[torch.Tensor, torch.Tensor]]
    validation: tuple[torch.Tensor, torch.Tensor]
    epochs: int
    samples: int  # per microbatch


def digits(epochs: int) -> Task:
    """scikit-learn's handwritten digits, a perceptron with one hidden layer."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = torch.tensor(data.data[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(data.target[order])
    train, size = 1400, 16

    def batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.from_numpy(rng.integers(0, train, size))
        return x[chosen], y[chosen]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    return Task(make, batch, (x[train:], y[train:]), epochs, size)


class Language(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.embedding(tokens) + self.position[:length], mask=mask, is_causal=True)
        logits: torch.Tensor = self.out(hidden)
        return logits.flatten(0, 1)


def language(epochs: int) -> Task:
    """Predicting the next character of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    data = torch.from_numpy(np.frombuffer(text, np.uint8).copy()).clamp_(max=127).long()
    length, size, split = 64, 8, int(len(data) * 0.9)

    def cut(starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([data[at : at + length + 1] for at in starts.tolist()])
        return rows[:, :-1], rows[:, 1:].flatten()

    def batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return cut(rng.integers(0, split - length - 1, size))

    fixed = np.random.default_rng(1).integers(split, len(data) - length - 1, 256)
    return Task(Language, batch, cut(fixed), epochs, size)


class Slow:
    """Brings a round's outcome only when its peer has all but the last microbatch of the next epoch.

    So every update comes as late as delayed updates allow.
    """

    def __init__(self, optimizer: CollaborativeOptimizer, warmup: int) -> None:
        self._counted = self._wanted = 0
        self._over = False
        self._changed = threading.Condition()
        training: Any = optimizer._training
        update: Any = optimizer._update
        arrive, submit = training.arrive, update._submit

        def handed_in(contribution: Any, taken: Any) -> None:
            delayed = optimizer.epoch >= warmup
            self._wanted = self._counted + (MICROBATCHES - 1 if delayed else 0)
            submit(contribution, taken)

        def late(contribution: Any, *arguments: Any) -> Any:
            outcome = arrive(contribution, *arguments)
            if contribution.samples:
                with self._changed:
                    self._changed.wait_for(lambda: self._over or self._counted >= self._wanted)
            return outcome

        training.arrive, update._submit = late, handed_in

    def microbatch(self) -> None:
        with self._changed:
            self._counted += 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


def train(task: Task, seed: int, warmup: int | None) -> float:
    """The validation loss after task.epochs epochs, delayed after `warmup` of them; None: not delayed.

    The samples depend on the seed alone.
    """
    torch.manual_seed(seed)
    model, rng = task.make(), np.random.default_rng(1000 + seed)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = CollaborativeOptimizer(
        inner,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(inner, task.epochs),
        run_id=f"bars-{random.getrandbits(64):x}",
        target_batch_size=MICROBATCHES * task.samples,
        batch_size_per_step=task.samples,
        initial_peers=[],
        listen="127.0.0.1:0",
        delay_updates=warmup is not None,
        delay_warmup_epochs=warmup or 0,
    )
    slow = Slow(optimizer, warmup) if warmup is not None else None
    for _ in range(task.epochs * MICROBATCHES):
        inputs, targets = task.batch(rng)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if slow is not None:
            slow.microbatch()
        optimizer.step()
    if slow is not None:
        slow.end()
    optimizer.close(0.0)
    with torch.no_grad():
        inputs, targets = task.validation
        return float(nn.functional.cross_entropy(model(inputs), targets))


TASKS: dict[str, tuple[Callable[[int], Task], int]] = {  # and its epochs
    "digits": (digits, 300),
    "standard library": (language, 400),
}
WARM = {"synchronous": None, "delayed": 0.0, "warmed": 0.25}  # the share of the epochs that are not delayed


def loss_of(name: str, seed: int, kind: str, epochs: int | None) -> float:
    """`train`, in a process of its own."""
    torch.set_num_threads(1)
    make, usual = TASKS[name]
    task, share = make(epochs or usual), WARM[kind]
    return train(task, seed, None if share is None else max(1, int(share * task.epochs)))


def tasks(seeds: int, epochs: int | None) -> dict[str, Any]:
    """Validation losses of both tasks, synchronous, delayed from the second epoch on, and delayed from a
    quarter of the run on; as many at once as there are cores.
    """
    runs = [(name, seed, kind, epochs) for name in TASKS for seed in range(seeds) for kind in WARM]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        losses = dict(zip(runs, pool.map(loss_of, *zip(*runs, strict=True)), strict=True))
    found: dict[str, Any] = {}
    for name in TASKS:
        of = {kind: [losses[name, seed, kind, epochs] for seed in range(seeds)] for kind in WARM}
        middle = {kind: median(values) for kind, values in of.items()}
        spread = max(of["synchronous"]) - min(of["synchronous"])
        apart = {kind: abs(middle[kind] - middle["synchronous"]) for kind in ("delayed", "warmed")}
        found[name] = {
            **of,
            **{f"{kind}_median": value for kind, value in middle.items()},
            "spread": spread,
            "median_apart": apart["delayed"],
            "within": apart["delayed"] <= spread,
            "warmed_apart": apart["warmed"],
            "warmed_within": apart["warmed"] <= spread,
        }
    return found


def large(params: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer, Masters]:
    """`params` float32 parameters in layers of 4M, AdamW, and its masters on the CPU."""
    layer = 1 << 22
    live = [nn.Parameter(torch.full((layer,), 0.01)) for _ in range(max(1, params // layer))]
    optimizer = torch.optim.AdamW(live, lr=1e-4)
    return live, optimizer, Masters(optimizer, offload=True)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def copies(elements: int) -> Iterator[float]:
    """Seconds of copying float32[elements], out of cache."""
    source, target = torch.ones(elements), torch.zeros(elements)
    while True:
        yield timed(lambda: target.copy_(source))


def step(params: int, rounds: int) -> dict[str, Any]:
    """One thread: the offloaded step, and what its bytes take at the copy rate of the same run."""
    torch.set_num_threads(1)
    live, _, masters = large(params)
    count = sum(p.numel() for p in live)
    layout = exchange_layout([p.numel() for p in live])
    vector = np.full(layout.numel, 1e-3, np.float32)
    copy = copies(1 << 26)
    steps, rates = [], []
    for repetition in range(rounds + 1):
        seconds = timed(lambda: masters.step(vector, layout))
        rate = 8 * (1 << 26) / next(copy)
        if repetition:  # the first makes the state
            steps.append(seconds)
            rates.append(rate)
    ideal = STEP_BYTES * count / median(rates)
    return {
        "parameters": count,
        "step_seconds": median(steps),
        "copy_gb_per_s": median(rates) / 1e9,
        "ideal_seconds": ideal,
        "ratio": median(steps) / ideal,
        "bar": 1.2,
    }


def swap(params: int, rounds: int) -> dict[str, Any]:
    """One thread: masters into the model, and one copy of as many bytes, by turns."""
    torch.set_num_threads(1)
    live, _, masters = large(params)
    copy = copies(sum(p.numel() for p in live))
    pairs = [(timed(masters.publish), next(copy)) for _ in range(rounds + 1)][1:]
    return {
        "bytes": 4 * sum(p.numel() for p in live),
        "swap_seconds": median(a for a, _ in pairs),
        "copy_seconds": median(b for _, b in pairs),
        "ratio": median(a / b for a, b in pairs),
        "bar": 1.2,
    }


def penalty(steps: int, step_seconds: float, epochs: int, *more: str) -> dict[str, Any]:
    """`p2pavg bench penalty` between two hosts of LINK."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "penalty.json"
        command = [sys.executable, "-m", "p2pavg", "bench", "penalty", "--lab", LINK, "--peers", "2"]
        command += ["--params", "4000000", "--steps", f"{steps}", "--step-seconds", f"{step_seconds}"]
        command += ["--epochs", f"{epochs}", "--json", f"{out}", *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=280)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def link(epochs: int) -> dict[str, Any]:
    """Epochs with delayed updates, beside the longer of calculation and communication; and without."""
    steps, step_seconds = 10, 0.05
    for _ in range(2):  # communication depends a little on where in an epoch steps end
        found = penalty(steps, step_seconds, 8)
        communication = found["epoch_seconds_median"] - found["calculating_seconds_median"]
        step_seconds = communication / 0.8 / steps
    waiting = penalty(steps, step_seconds, epochs)
    delayed = penalty(steps, step_seconds, epochs, "--delay")
    computing = penalty(steps, step_seconds, epochs, "--delay", "--compute", "torch", "--batch", "64")
    calculation = waiting["calculating_seconds_median"]
    communication = waiting["epoch_seconds_median"] - calculation
    mean = sum(delayed["epoch_seconds"]) / len(delayed["epoch_seconds"])
    return {
        "topology": LINK,
        "epochs": epochs,
        "calculation_seconds": calculation,
        "communication_seconds": communication,
        "waiting_epoch_seconds": waiting["epoch_seconds_median"],
        "delayed_epoch_seconds_mean": mean,
        "delayed_epoch_seconds_median": delayed["epoch_seconds_median"],
        "delayed_over_longer": mean / max(calculation, communication),
        "bar": 1.05,
        "computing_epoch_seconds": computing["epoch_seconds_median"],
        "computing_calculation_seconds": computing["calculating_seconds_median"],
        "computing_averaging_cpu_seconds": computing["averaging_cpu_seconds_per_epoch"],
        "computing_local_over_baseline": computing["local_over_baseline"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--only", nargs="*", choices=("step", "swap", "tasks", "link"))
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="of link")
    parser.add_argument("--task-epochs", type=int, help="of tasks; default: 300 and 400")
    args = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "step": lambda: step(args.params, args.rounds),
        "swap": lambda: swap(args.params, args.rounds),
        "tasks": lambda: tasks(args.seeds, args.task_epochs),
        "link": lambda: link(args.epochs),
    }
    result: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        result = json.loads(args.json.read_text())
    result["environment"] = environment()
    for name, section in sections.items():
        if args.only is not None and name not in args.only:
            continue
        result[name] = section()
        print(name, json.dumps(result[name]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
