"""Spool: results that wait on a disk, in files without a name, of which nothing can stay."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
LOOK_BYTES = 4 << 20  # that are looked at together


class Spool:
    """Where bytes go that would take too much memory. Pages of zeros, such as rows of an embedding that no
    batch had, are holes in their file: they cost no disk, and nobody has to unpack anything to read them.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """directory: None: the system's for temporary files."""
        self._directory = directory
        self.spared = 0  # bytes that were left out

    def put(self, data: U8) -> U8:
        """The same bytes, read-only, from a file. Raises OSError."""
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.truncate(data.nbytes)
            view, written = memoryview(data), 0
            for run in _runs(data):
                file.seek(run.start)
                file.write(view[run])  # not through the map, where a full disk would end the process
                written += run.stop - run.start
            file.flush()
            kept = np.memmap(file, np.uint8, "r", shape=data.shape)
        self.spared += data.nbytes - written
        return kept


def _runs(data: U8) -> Iterator[slice]:
    """Neighbouring pages that are not all zeros; the end that fills no page is one."""
    for start in range(0, data.nbytes, LOOK_BYTES):
        part = data[start : start + LOOK_BYTES]
        pages = part.nbytes // PAGE_BYTES
        full = part[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES).any(axis=1)
        edges = np.flatnonzero(np.diff(full.astype(np.int8), prepend=0, append=0)) * PAGE_BYTES + start
        for first, end in edges.reshape(-1, 2).tolist():
            yield slice(first, end)
        if part.nbytes % PAGE_BYTES:
            yield slice(start + pages * PAGE_BYTES, start + part.nbytes)
