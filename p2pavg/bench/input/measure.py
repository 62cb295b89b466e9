"""Times every split of a pipeline: whole loops, because the sum of its steps' times is often wrong by
half. The samples are read as training reads them, from archives or files, which the system keeps in memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.feeding import feeding
from p2pavg.bench.input.loops import timed
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline, packed, unpacked
from p2pavg.bench.input.stored import Stored, store
from p2pavg.bench.result import percentile
from p2pavg.bench.undisturbed import undisturbed

SAMPLES = 64  # samples in one loop
REPEATED = 8  # samples that run twice: a step that does something to every other one is found by one of them


@dataclass(frozen=True, slots=True)
class Split:
    """The figures of one split: the first `offline` steps run once beforehand, the others in each pass."""

    offline: int
    codec: str
    sps: float  # samples/s of one process that only reads and computes, median over loops
    sps_low: float  # 10th and 90th percentile of the loops
    sps_high: float
    sps_workers: float  # samples/s that all workers together hand to the trainer, median
    workers_low: float  # 10th and 90th percentile
    workers_high: float
    sps_memory: float  # of one process whose samples are in its memory, offline steps done
    kb_per_sample: float  # stored bytes of a sample
    offline_seconds: float  # duration of the offline steps for the whole dataset, on one worker
    offline_bytes: float
    step_seconds: tuple[float, ...]  # of each online step, for one sample
    read_seconds: float  # reading, decompressing and unpacking one sample
    handing_seconds: float  # what a worker needs for a sample beside reading and computing


def splits(pipeline: Pipeline, source: Source, ways: Sequence[Compression], workers: int) -> Iterator[Split]:
    """All splits with all ways of compression, each as soon as it is measured. Raises ConfigurationError for
    steps that fail or are random.
    """
    samples = source.some(SAMPLES)
    pipeline.check_repeatable(samples[:REPEATED])
    for offline in range(pipeline.offline + 1):
        begun = time.perf_counter()
        values = [packed(pipeline.run(each.data, 0, offline, each.name)) for each in samples]
        preparing = (time.perf_counter() - begun) / len(samples) * source.count if offline else 0.0
        held = _in_memory(pipeline, offline, values)
        for way in ways if offline else ways[:1]:  # raw samples are stored as they are
            with tempfile.TemporaryDirectory(prefix="p2pavg-input-") as folder:
                begun = time.perf_counter()
                stored = store(Path(folder), source, samples, values if offline else None, way)
                storing = (time.perf_counter() - begun) / (len(stored.loops) * len(values)) * source.count
                once = preparing + storing if offline else 0.0
                yield _measured(pipeline, offline, way, stored, source.count, once, held, workers)


def _measured(
    pipeline: Pipeline,
    offline: int,
    way: Compression,
    stored: Stored,
    count: int,
    once: float,
    held: float,
    workers: int,
) -> Split:
    def samples(number: int) -> Iterator[Any]:
        for sample in stored.loop(number):
            value = unpacked(way.decompress(sample.data)) if offline else sample.data
            yield pipeline.run(value, offline, len(pipeline.steps), sample.name)

    def loop(number: int) -> None:
        for _ in samples(number):
            pass

    begun = time.perf_counter(), undisturbed()
    rates = [stored.count / seconds for seconds in timed(loop)]
    ours = (undisturbed() - begun[1]) / (time.perf_counter() - begun[0])  # of a core, beside other processes
    fed = feeding(samples, workers)
    steps, reading = _steps(pipeline, offline, way, stored)
    cores = os.cpu_count() or 1
    return Split(
        offline=offline,
        codec=way.name,
        sps=median(rates),
        sps_low=percentile(rates, 10),
        sps_high=percentile(rates, 90),
        sps_workers=median(fed),
        workers_low=percentile(fed, 10),
        workers_high=percentile(fed, 90),
        sps_memory=held,
        kb_per_sample=stored.nbytes / 1e3,
        offline_seconds=once,
        offline_bytes=stored.nbytes * count if offline else 0.0,
        step_seconds=steps,
        read_seconds=reading,
        handing_seconds=max(0.0, min(workers, cores) * ours / median(fed) - 1 / median(rates)),
    )


def _in_memory(pipeline: Pipeline, offline: int, values: Sequence[bytes]) -> float:
    """Samples/s of the online steps alone."""
    held = [unpacked(value) for value in values]

    def loop(_: int) -> None:
        for value in held:
            pipeline.run(value, offline, len(pipeline.steps))

    return len(held) / median(timed(loop))


def _steps(
    pipeline: Pipeline, offline: int, way: Compression, stored: Stored
) -> tuple[tuple[float, ...], float]:
    """Seconds per sample of each online step and of reading, which show the slowest, not the whole rate."""
    begun = time.perf_counter()
    samples = list(stored.loop(0))
    values: list[Any] = [unpacked(way.decompress(each.data)) if offline else each.data for each in samples]
    reading = (time.perf_counter() - begun) / len(samples)
    seconds = []
    for number in range(offline, len(pipeline.steps)):
        begun = time.perf_counter()
        values = [
            pipeline.run(value, number, number + 1, sample.name)
            for sample, value in zip(samples, values, strict=True)
        ]
        seconds.append((time.perf_counter() - begun) / len(values))
    return tuple(seconds), reading
