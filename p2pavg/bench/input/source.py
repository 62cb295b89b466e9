"""The raw samples: the files that match a glob, and the members of tar archives among them."""

from __future__ import annotations

import glob
import io
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from p2pavg.bench.input.named import named
from p2pavg.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RawSample:
    """One raw sample."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Source:
    """The samples of a dataset, in the order of its files."""

    files: Sequence[str]
    count: int  # samples in all
    nbytes: int  # bytes of all files
    given: Iterable[bytes] = ()  # the samples themselves, where there are no files

    @classmethod
    def of(cls, pattern: str) -> Source:
        """The files that match, or the iterable MODULE:NAME of each sample's bytes. Raises ConfigurationError
        when no file matches, or a file cannot be read.
        """
        if ":" in pattern and not glob.glob(pattern, recursive=True):
            return cls._of_iterable(named(pattern, "the samples"), pattern)
        files = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        if not files:
            raise ConfigurationError(f"no file matches --data {pattern!r}")
        try:
            count = sum(_members(name) for name in files)
            nbytes = sum(Path(name).stat().st_size for name in files)
        except (OSError, tarfile.TarError) as error:
            raise ConfigurationError(f"--data {pattern!r} cannot be read: {error}") from None
        if not count:
            raise ConfigurationError(f"the files of --data {pattern!r} hold no sample")
        return cls(files, count, nbytes)

    @classmethod
    def _of_iterable(cls, given: Any, text: str) -> Source:
        """All of it is counted, as nobody else knows how many there are."""
        sizes = [len(data) if isinstance(data, bytes) else -1 for data in given]
        if not sizes or min(sizes) < 0 or iter(given) is given:
            raise ConfigurationError(
                f"--data {text!r} has to be files, or an iterable that gives bytes each time it is iterated"
            )
        return cls((), len(sizes), sum(sizes), given)

    def __iter__(self) -> Iterator[RawSample]:
        for name in self.files:
            yield from read(name)
        for number, data in enumerate(self.given):
            yield RawSample(f"sample {number}", data)

    def some(self, count: int) -> list[RawSample]:
        """`count` samples, spread over the whole dataset, which is often sorted."""
        if count >= self.count:
            return list(islice(cycle(self), count)) if self.count else []
        stride = self.count // count
        return list(islice(islice(self, 0, None, stride), count))


def read(name: str) -> Iterator[RawSample]:
    """The samples of one file: the members of an archive, or the file itself."""
    if not is_tar(name):
        yield RawSample(name, Path(name).read_bytes())
        return
    with tarfile.open(name) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield RawSample(f"{name}:{member.name}", file.read())


def pack(name: str, samples: Iterable[RawSample]) -> None:
    """Write an archive of samples."""
    with tarfile.open(name, "w") as archive:
        for number, sample in enumerate(samples):
            info = tarfile.TarInfo(f"{number:09}")
            info.size = len(sample.data)
            archive.addfile(info, io.BytesIO(sample.data))


def is_tar(name: str) -> bool:
    """Whether a file is an archive of samples."""
    return name.endswith((".tar", ".tar.gz", ".tgz"))


def _members(name: str) -> int:
    if not is_tar(name):
        return 1
    with tarfile.open(name) as archive:
        return sum(member.isfile() for member in archive)
