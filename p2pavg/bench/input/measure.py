"""Times every split of a pipeline: whole loops, because the sum of its steps' times is often wrong by
half.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.source import RawSample, Source
from p2pavg.bench.input.steps import Pipeline, packed, unpacked
from p2pavg.bench.result import percentile

SAMPLES = 64  # samples in one loop
LEAST_S = 0.6  # seconds for which a split is timed at least
LEAST_LOOPS = 3


@dataclass(frozen=True, slots=True)
class Split:
    """The figures of one split: the first `offline` steps run once beforehand, the others in each pass."""

    offline: int
    codec: str
    sps: float  # samples/s of one worker, median over loops
    sps_low: float  # 10th and 90th percentile of the loops
    sps_high: float
    sps_workers: float  # samples/s of all workers together
    kb_per_sample: float  # stored bytes of a sample
    offline_seconds: float  # duration of the offline steps for the whole dataset, on one worker
    offline_bytes: float
    step_seconds: tuple[float, ...]  # of each online step, for one sample
    read_seconds: float  # decompressing and unpacking one sample


def measure(
    pipeline: Pipeline,
    source: Source,
    ways: Sequence[Compression],
    workers: int,
    advance: Callable[[float], None],
) -> list[Split]:
    """All splits with all ways of compression. Raises ConfigurationError for steps that fail or are
    random.
    """
    samples = source.some(SAMPLES)
    pipeline.check_repeatable(samples[0])
    splits = []
    for offline in range(pipeline.offline + 1):
        begun = time.perf_counter()
        values = [packed(pipeline.run(each.data, 0, offline, each.name)) for each in samples]
        preparing = (time.perf_counter() - begun) / len(samples) * source.count if offline else 0.0
        for way in ways if offline else ways[:1]:  # raw samples are stored as they are
            splits.append(
                _measured(pipeline, offline, way, samples, values, source.count, preparing, workers)
            )
            advance(1)
    return splits


def _measured(
    pipeline: Pipeline,
    offline: int,
    way: Compression,
    samples: Sequence[RawSample],
    values: Sequence[bytes],
    count: int,
    preparing: float,
    workers: int,
) -> Split:
    begun = time.perf_counter()
    stored = [way.compress(value) for value in values]
    if way.name != "none":
        preparing += (time.perf_counter() - begun) / len(values) * count

    def loop() -> None:
        for sample, data in zip(samples, stored, strict=True):
            pipeline.run(unpacked(way.decompress(data)), offline, len(pipeline.steps), sample.name)

    rates = [len(samples) / seconds for seconds in timed(loop)]
    size = sum(map(len, stored)) / len(stored)
    steps, reading = _steps(pipeline, offline, way, samples, stored)
    return Split(
        offline=offline,
        codec=way.name,
        sps=median(rates),
        sps_low=percentile(rates, 10),
        sps_high=percentile(rates, 90),
        sps_workers=median(rates) if workers == 1 else _side_by_side(loop, workers, len(samples)),
        kb_per_sample=size / 1e3,
        offline_seconds=preparing,
        offline_bytes=size * count if offline else 0.0,
        step_seconds=steps,
        read_seconds=reading,
    )


def timed(loop: Callable[[], None]) -> list[float]:
    """Seconds of each loop except the first, which is warm-up."""
    loop()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < LEAST_LOOPS or time.perf_counter() - began < LEAST_S:
        begun = time.perf_counter()
        loop()
        seconds.append(time.perf_counter() - begun)
    return seconds


def _side_by_side(loop: Callable[[], None], workers: int, samples: int) -> float:
    """Samples/s of `workers` processes that all run the same loop at once."""
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(workers), context.SimpleQueue()

    def work() -> None:
        try:
            loop()
            barrier.wait(60)
            seconds = timed(loop)
            told.put(samples * len(seconds) / sum(seconds))
        except BaseException:
            barrier.abort()
            told.put(0.0)

    processes = [context.Process(target=work, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    rates = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return float(sum(rates))


def _steps(
    pipeline: Pipeline, offline: int, way: Compression, samples: Sequence[RawSample], stored: Sequence[bytes]
) -> tuple[tuple[float, ...], float]:
    """Seconds per sample of each online step and of reading, which show the slowest, not the whole rate."""
    begun = time.perf_counter()
    values: list[Any] = [unpacked(way.decompress(data)) for data in stored]
    reading = (time.perf_counter() - begun) / len(stored)
    seconds = []
    for number in range(offline, len(pipeline.steps)):
        begun = time.perf_counter()
        values = [
            pipeline.run(value, number, number + 1, sample.name)
            for sample, value in zip(samples, values, strict=True)
        ]
        seconds.append((time.perf_counter() - begun) / len(values))
    return tuple(seconds), reading
