"""Backlog: encoded results that wait until a newcomer has its state, in memory or on disk."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2pavg.rounds.training import Average

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

MEMORY_BYTES = 1 << 28
TELL_AFTER_S = 5.0  # of a download, before its rate is compared


class Backlog:
    """Counts what waits, moves it to an unlinked file where it would take too much memory, and tells when it
    grows faster than the state arrives. Runs on the loop thread.

    memory_bytes: kept in memory. directory: for the rest; None: the system's for temporary files.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, directory: Path | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._directory = directory
        self._in_memory: dict[int, int] = {}  # bytes, by the average's identity
        self._began_at = 0.0
        self._results = self._bytes = 0
        self._told = False

    def begin(self, now: float) -> None:
        """A download begins; results that wait from an earlier one keep their place."""
        self._began_at = now
        self._results = self._bytes = 0
        self._told = False

    def add(self, average: Average) -> Average:
        """The same average, with its result where it may stay."""
        data = average.result.data
        self._results += 1
        self._bytes += data.nbytes
        in_memory = sum(self._in_memory.values())
        if in_memory + data.nbytes <= self._memory_bytes:
            self._in_memory[id(average)] = data.nbytes
            return average
        try:
            return replace(average, result=replace(average.result, data=self._spilled(data)))
        except OSError as error:
            logger.warning(
                "%.1f MB of results wait in memory for the state, and there is no place on disk (%s)",
                in_memory / 1e6,
                error,
            )
            self._in_memory[id(average)] = data.nbytes
            return average

    def _spilled(self, data: U8) -> U8:
        with tempfile.TemporaryFile(dir=self._directory) as file:  # it has no name: nothing of it can stay
            file.truncate(data.nbytes)
            file.write(memoryview(data))  # not through the map, where a full disk would end the process
            file.flush()
            return np.memmap(file, np.uint8, "r", shape=data.shape)

    def remove(self, average: Average) -> None:
        """It is given to the training thread, or void."""
        self._in_memory.pop(id(average), None)

    def look(self, now: float, progress: tuple[int, int, int] | None) -> None:
        """Say so, once, when the results come faster than the state. progress: as `Downloader.progress`."""
        seconds = now - self._began_at
        if self._told or progress is None or seconds < TELL_AFTER_S or not self._results:
            return
        done, total, _ = progress
        if done >= total or self._bytes <= done:
            return
        self._told = True
        logger.warning(
            "results come faster than the state: in %.0f s, %d results of %.1f MB together against %.1f of "
            "%.1f MB of state; a faster link, a smaller codec or longer epochs let this peer join",
            seconds,
            self._results,
            self._bytes / 1e6,
            done / 1e6,
            total / 1e6,
        )
