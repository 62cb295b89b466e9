"""Bars of the optimizer on one CPU. `python -m bench.optimizer_bars --json PATH [--only tasks step swap]`.

tasks: two real tasks trained with updates delayed by a whole epoch, beside five synchronous seeds.
step: AdamW on offloaded masters, beside what 28 bytes per parameter take at the copy rate; one thread.
swap: the masters' way into the model at a step(), beside one copy of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pavg import CollaborativeOptimizer
from p2pavg.bench import common
from p2pavg.optim.layout import exchange_layout
from p2pavg.optim.masters import Masters

MICROBATCHES = 4  # per epoch
STEP_BYTES = 28  # per parameter: gradient, parameter and two moments read, the latter three written


@dataclass
class Task:
    """A model and its data. batch(generator) -> inputs and targets; validation: the same, fixed."""

    make: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], tuple[torch.Tensor, torch.Tensor]]
    validation: tuple[torch.Tensor, torch.Tensor]
    epochs: int
    samples: int  # per microbatch
    lr: float


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

    return Task(make, batch, (x[train:], y[train:]), epochs, size, 2e-3)


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
    return Task(Language, batch, cut(fixed), epochs, size, 2e-3)


class Slow:
    """Lets a round begin only when its peer has accumulated the next epoch but for its last microbatch."""

    def __init__(self, optimizer: CollaborativeOptimizer) -> None:
        self._counted = 0
        self._changed = threading.Condition()
        training: Any = optimizer._training
        arrive = training.arrive

        def late(contribution: Any, *arguments: Any) -> Any:
            if contribution.samples:
                with self._changed:
                    wanted = self._counted + MICROBATCHES - 1
                    self._changed.wait_for(lambda: self._counted >= wanted, 60)
            return arrive(contribution, *arguments)

        training.arrive = late

    def microbatch(self) -> None:
        with self._changed:
            self._counted += 1
            self._changed.notify_all()


def train(task: Task, seed: int, delayed: bool) -> float:
    """The validation loss after task.epochs epochs. The samples depend on the seed alone."""
    torch.manual_seed(seed)
    model, rng = task.make(), np.random.default_rng(1000 + seed)
    optimizer = CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=task.lr),
        run_id=f"bars-{random.getrandbits(64):x}",
        target_batch_size=MICROBATCHES * task.samples,
        batch_size_per_step=task.samples,
        initial_peers=[],
        listen="127.0.0.1:0",
        delay_updates=delayed,
    )
    slow = Slow(optimizer) if delayed else None
    for _ in range(task.epochs * MICROBATCHES):
        inputs, targets = task.batch(rng)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        if slow is not None:
            slow.microbatch()
        optimizer.step()
    optimizer.close(0.0)
    with torch.no_grad():
        inputs, targets = task.validation
        return float(nn.functional.cross_entropy(model(inputs), targets))


def tasks(seeds: int) -> dict[str, Any]:
    """Delayed and synchronous validation losses of both tasks."""
    found: dict[str, Any] = {}
    for name, make in (("digits", lambda: digits(300)), ("standard library", lambda: language(300))):
        try:
            task = make()
        except ImportError as error:
            found[name] = {"skipped": f"{error}"}
            continue
        synchronous = [train(task, seed, delayed=False) for seed in range(seeds)]
        delayed = [train(task, seed, delayed=True) for seed in range(seeds)]
        spread = max(synchronous) - min(synchronous)
        apart = abs(median(delayed) - median(synchronous))
        found[name] = {
            "samples": task.epochs * MICROBATCHES * task.samples,
            "synchronous": synchronous,
            "delayed": delayed,
            "spread": spread,
            "median_apart": apart,
            "within": apart <= spread,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--only", nargs="*", choices=("tasks", "step", "swap"))
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "step": lambda: step(args.params, args.rounds),
        "swap": lambda: swap(args.params, args.rounds),
        "tasks": lambda: tasks(args.seeds),
    }
    result: dict[str, Any] = {"environment": common.environment()}
    for name, section in sections.items():
        if args.only is not None and name not in args.only:
            continue
        result[name] = section()
        print(name, json.dumps(result[name]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
