"""Writes the offline part of a pipeline: tar shards of samples after the steps that are done beforehand."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from p2pavg.bench.input.compression import Compression
from p2pavg.bench.input.measure import Split
from p2pavg.bench.input.source import Source
from p2pavg.bench.input.steps import Pipeline, packed
from p2pavg.errors import ConfigurationError

SAMPLES_PER_SHARD = 1000
HEADROOM = 1.1  # the bytes of the samples, extrapolated, are multiplied by this factor
TAR_BYTES = 1024  # added to each member by the archive


def check_folder(directory: Path) -> None:
    """Raises ConfigurationError when shards cannot go there, before anything is measured."""
    if not directory.parent.is_dir():
        raise ConfigurationError(f"the folder of --write {str(directory)!r} does not exist; make it first")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(f"--write {str(directory)!r} is not empty; name another folder")


def check_room(directory: Path, split: Split, count: int) -> None:
    """Raises ConfigurationError when the disk has too little room, before anything is written."""
    wanted = HEADROOM * (split.offline_bytes + TAR_BYTES * count)
    free = shutil.disk_usage(directory.parent).free
    if free < wanted:
        raise ConfigurationError(
            f"the shards take about {wanted / 1e9:.2f} GB, and {str(directory.parent)!r} has "
            f"{free / 1e9:.2f} GB left: choose another disk with --write"
        )


def write(
    directory: Path,
    pipeline: Pipeline,
    source: Source,
    split: Split,
    way: Compression,
    advance: Callable[[float], None],
) -> int:
    """Write `shard-00000.tar` and so on. Returns how many. Raises ConfigurationError when the disk is
    full.
    """
    directory.mkdir(exist_ok=True)
    samples, number = iter(source), 0
    try:
        while some := list(islice(samples, SAMPLES_PER_SHARD)):
            with tarfile.open(directory / f"shard-{number:05}.tar", "w") as archive:
                for at, sample in enumerate(some):
                    data = way.compress(packed(pipeline.run(sample.data, 0, split.offline, sample.name)))
                    info = tarfile.TarInfo(f"{number * SAMPLES_PER_SHARD + at:09}.{way.name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                    advance(1)
            number += 1
    except OSError as error:
        raise ConfigurationError(f"cannot write shards to {str(directory)!r}: {error}") from None
    return number
