"""The samples that a split reads in each pass, as they stand on disk: as many bytes as its whole dataset
has, or as many as drive a loop out of the processor's cache before it comes again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.source import RawSample, Source, is_tar, pack, read
from p2pavg.errors import ConfigurationError

CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
USUAL_CACHE, MOST_CACHE = 32 << 20, 128 << 20  # bytes
MOST_LOOPS = 128  # of files of their own


@dataclass(frozen=True, slots=True)
class Stored:
    """The files of some loops, which take turns."""

    loops: Sequence[Sequence[str]]
    count: int  # samples of a loop
    nbytes: float  # of one sample

    def loop(self, number: int) -> Iterator[RawSample]:
        for name in self.loops[number % len(self.loops)]:
            yield from read(name)


def store(
    folder: Path,
    source: Source,
    samples: Sequence[RawSample],
    values: Sequence[bytes] | None,
    way: Compression,
) -> Stored:
    """values: of the samples, whose first steps are done; None: raw ones, archived or files of their own.

    Raises ConfigurationError when the disk has no room for them.
    """
    if values is None and source.files and not any(map(is_tar, source.files)):
        return _files(source, samples)
    raw = [sample.data for sample in samples] if values is None else [way.compress(value) for value in values]
    size = sum(map(len, raw)) / len(raw)
    loops = _turns(size * len(raw), size * source.count)
    files = [str(folder / f"{number}.tar") for number in range(loops)]
    try:
        pack(files[0], (RawSample(sample.name, data) for sample, data in zip(samples, raw, strict=True)))
        for name in files[1:]:
            shutil.copyfile(files[0], name)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {loops * sum(map(len, raw)) / 1e6:,.0f} MB of samples to {folder} "
            f"({error.strerror}): make room there, or set TMPDIR to another folder"
        ) from None
    return Stored([[name] for name in files], len(samples), size)


def _files(source: Source, samples: Sequence[RawSample]) -> Stored:
    """The files of the dataset itself, read once, so that they are in the system's memory."""
    size = sum(len(sample.data) for sample in samples) / len(samples)
    names = [sample.name for sample in samples]
    loops = [names]
    others = [name for name in source.files if name not in set(names)]
    for number in range(_turns(size * len(names), size * source.count) - 1):
        some = others[number * len(names) : (number + 1) * len(names)]
        if len(some) == len(names):
            loops.append(some)
            for name in some:
                Path(name).read_bytes()
    return Stored(loops, len(names), size)


def _turns(loop: float, dataset: float) -> int:
    """How many loops of so many bytes take turns."""
    return max(1, min(MOST_LOOPS, ceil(min(dataset, 2 * cache_bytes()) / max(1.0, loop))))


def cache_bytes() -> int:
    """The processor's last cache."""
    with suppress(OSError, ValueError):
        text = CACHE.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        return min(MOST_CACHE, int(text.rstrip("KM")) * unit)
    return USUAL_CACHE
