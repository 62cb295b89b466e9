"""Times every split of a pipeline: whole loops, because the sum of its steps' times is often wrong by
half. The samples are read as training reads them, from archives or files, which the system keeps in memory.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.source import RawSample, Source, is_tar, pack, read
from p2pavg.bench.input.steps import Pipeline, packed, unpacked
from p2pavg.bench.result import percentile
from p2pavg.errors import ConfigurationError

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
    read_seconds: float  # reading, decompressing and unpacking one sample


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
    with tempfile.TemporaryDirectory(prefix="p2pavg-input-") as folder:
        shard, archived = str(Path(folder) / "shard.tar"), any(map(is_tar, source.files))
        for offline in range(pipeline.offline + 1):
            begun = time.perf_counter()
            values = [packed(pipeline.run(each.data, 0, offline, each.name)) for each in samples]
            preparing = (time.perf_counter() - begun) / len(samples) * source.count if offline else 0.0
            for way in ways if offline else ways[:1]:  # raw samples are stored as they are
                begun = time.perf_counter()
                stored = _stored(shard, samples, values if offline else None, way, archived)
                storing = (time.perf_counter() - begun) / len(values) * source.count if offline else 0.0
                splits.append(
                    _measured(pipeline, offline, way, stored, source.count, preparing + storing, workers)
                )
                advance(1)
    return splits


@dataclass(frozen=True, slots=True)
class Stored:
    """The samples of a loop as they stand on disk."""

    files: Sequence[str]
    count: int
    nbytes: float  # of one sample

    def __iter__(self) -> Iterator[RawSample]:
        for name in self.files:
            yield from read(name)


def _stored(
    shard: str,
    samples: Sequence[RawSample],
    values: Sequence[bytes] | None,
    way: Compression,
    archived: bool,
) -> Stored:
    """values: of samples whose first steps are done; None: of the raw ones, archived or files of their
    own.
    """
    if values is None and not archived:
        size = sum(len(sample.data) for sample in samples) / len(samples)
        return Stored([sample.name for sample in samples], len(samples), size)
    raw = [sample.data for sample in samples] if values is None else [way.compress(value) for value in values]
    try:
        pack(shard, (RawSample(sample.name, data) for sample, data in zip(samples, raw, strict=True)))
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {sum(map(len, raw)) / 1e6:,.0f} MB of samples to {shard} ({error.strerror}): make "
            "room there, or set TMPDIR to another folder"
        ) from None
    return Stored([shard], len(samples), sum(map(len, raw)) / len(raw))


def _measured(
    pipeline: Pipeline,
    offline: int,
    way: Compression,
    stored: Stored,
    count: int,
    preparing: float,
    workers: int,
) -> Split:
    def loop() -> None:
        for sample in stored:
            value = unpacked(way.decompress(sample.data)) if offline else sample.data
            pipeline.run(value, offline, len(pipeline.steps), sample.name)

    rates = [stored.count / seconds for seconds in timed(loop)]
    steps, reading = _steps(pipeline, offline, way, stored)
    return Split(
        offline=offline,
        codec=way.name,
        sps=median(rates),
        sps_low=percentile(rates, 10),
        sps_high=percentile(rates, 90),
        sps_workers=median(rates) if workers == 1 else _side_by_side(loop, workers, stored.count),
        kb_per_sample=stored.nbytes / 1e3,
        offline_seconds=preparing,
        offline_bytes=stored.nbytes * count if offline else 0.0,
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
    pipeline: Pipeline, offline: int, way: Compression, stored: Stored
) -> tuple[tuple[float, ...], float]:
    """Seconds per sample of each online step and of reading, which show the slowest, not the whole rate."""
    begun = time.perf_counter()
    samples = list(stored)
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
