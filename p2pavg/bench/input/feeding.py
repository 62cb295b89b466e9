"""How fast a DataLoader feeds a trainer: its workers read, compute and collate, and hand batches over, which
often costs more than a cheap step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from p2pavg.bench.input.loops import LEAST_LOOPS, LEAST_S

BATCH = 32  # samples that a worker hands over at once
PREFETCH = 2  # batches of each worker that wait for the trainer


class Endless(IterableDataset[Any]):
    """Loops without end; each worker begins with another one."""

    def __init__(self, loop: Callable[[int], Iterator[Any]]) -> None:
        """loop: the samples of one."""
        self._loop = loop

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for number in count(0 if worker is None else worker.id):
            yield from self._loop(number)


def collated(samples: list[Any]) -> Any:
    """One batch as torch makes it; samples that do not fit together stay a list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arrays of a shard cannot be written to, and nobody here does
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError, ValueError, KeyError):
            return samples


def loader_of(samples: IterableDataset[Any], workers: int) -> DataLoader[Any]:
    """As for training. The workers' copy of `samples` needs no pickling."""
    return DataLoader(
        samples,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=collated,
        prefetch_factor=PREFETCH,
        multiprocessing_context="fork",
    )


def feeding(loop: Callable[[int], Iterator[Any]], workers: int) -> list[float]:
    """Samples/s of a trainer that takes all it can, time and again; what was made ahead is left out."""
    batches = iter(loader_of(Endless(loop), workers))
    for _ in range((PREFETCH + 1) * workers):
        next(batches)
    rates: list[float] = []
    began = time.perf_counter()
    while len(rates) < LEAST_LOOPS or time.perf_counter() - began < LEAST_S:
        begun = time.perf_counter()
        for _ in range(workers):  # batches come from the workers in turn
            next(batches)
        rates.append(BATCH * workers / (time.perf_counter() - begun))
    return rates
