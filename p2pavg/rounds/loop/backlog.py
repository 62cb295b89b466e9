"""Backlog: encoded results that wait until a newcomer has its state, in memory or on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from p2pavg.printable import size
from p2pavg.rounds.state.files.spool import Spool
from p2pavg.rounds.training import Average

logger = logging.getLogger("p2pavg.state")

MEMORY_BYTES = 1 << 28


class Backlog:
    """Counts what waits, and moves it to an unlinked file where it would take too much memory. Runs on the
    loop thread.

    memory_bytes: kept in memory. directory: for the rest; None: the system's for temporary files.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, directory: Path | None = None) -> None:
        self._memory_bytes = memory_bytes
        self.spool = Spool(directory)
        self._in_memory: dict[int, int] = {}  # bytes, by the average's identity

    def add(self, average: Average) -> Average:
        """The same average, with its result where it may stay."""
        data = average.result.data
        in_memory = sum(self._in_memory.values())
        if in_memory + data.nbytes <= self._memory_bytes:
            self._in_memory[id(average)] = data.nbytes
            return average
        try:
            return replace(average, result=replace(average.result, data=self.spool.put(data)))
        except OSError as error:
            logger.warning(
                "%s of results wait in memory for the state, and there is no place on disk (%s)",
                size(in_memory),
                error,
            )
            self._in_memory[id(average)] = data.nbytes
            return average

    def remove(self, average: Average) -> None:
        """It is given to the training thread, or void."""
        self._in_memory.pop(id(average), None)
