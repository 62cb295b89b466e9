"""Times a Dataset, a DataLoader or any other iterable of samples as it is, without a look at its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from p2pavg.bench.input.feeding import BATCH, feeding
from p2pavg.bench.input.loops import LEAST_LOOPS, LEAST_S
from p2pavg.errors import ConfigurationError

WARM = 4  # batches of a DataLoader before those that are timed


def is_whole(thing: object) -> bool:
    """Whether it gives samples by itself: it is no list of steps."""
    steps = isinstance(thing, list | tuple) and all(map(callable, thing))
    return not steps and (hasattr(thing, "__iter__") or hasattr(thing, "__getitem__"))


def rates(thing: Any, workers: int) -> list[float]:
    """Samples/s that a trainer gets, time and again: of a loader as it is set up, or of a DataLoader around a
    dataset with so many workers. Raises ConfigurationError where it gives no sample.
    """
    return _of_loader(thing) if isinstance(thing, DataLoader) else feeding(_loop(thing), workers)


def _loop(dataset: Any) -> Any:
    """BATCH samples of the dataset by the number of the loop, one after the other and round again."""
    length = len(dataset) if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else 0
    if length:
        return lambda number: (dataset[at % length] for at in range(number * BATCH, (number + 1) * BATCH))
    if next(iter(dataset), None) is None:
        raise ConfigurationError("the dataset gives no sample")
    return lambda _: iter(dataset)


def _of_loader(loader: DataLoader[Any]) -> list[float]:
    batches = _again(loader)
    for _ in islice(batches, WARM + loader.num_workers * (loader.prefetch_factor or 0)):
        pass
    found: list[float] = []
    began = begun = time.perf_counter()
    group, samples = max(1, loader.num_workers), 0  # batches come from the workers in turn
    for number, batch in enumerate(batches, 1):
        samples += size_of(batch) if loader.batch_size is None else loader.batch_size
        if number % group == 0:
            now = time.perf_counter()
            found.append(samples / (now - begun))
            if len(found) >= LEAST_LOOPS and now - began >= LEAST_S:
                return found
            begun, samples = now, 0
    raise ConfigurationError("the loader gives no batch")


def _again(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches, pass after pass; none where a pass has none."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch


def size_of(batch: Any) -> int:
    """Samples of a batch: the length of its first part; 1 for what has none."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) if hasattr(batch, "__len__") and getattr(batch, "ndim", None) != 0 else 1
