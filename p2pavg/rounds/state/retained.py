"""The results that a donor keeps for those that download its state, in memory and on disk, within a bound."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2pavg.printable import size
from p2pavg.rounds.machine.rules.deadlines import MOST_BEHIND
from p2pavg.rounds.state.files.spool import Spool
from p2pavg.rounds.state.results import ResultHead

logger = logging.getLogger("p2pavg.state")
U8 = npt.NDArray[np.uint8]

MEMORY_BYTES = 1 << 28  # the rest waits on disk
MOST_BYTES = 1 << 30  # of all results that wait, or
MOST_STATES = 2  # so many times the state: a newcomer that lacks more has to begin anew


@dataclass(slots=True)
class KeptResult:
    """A result, and its bytes."""

    head: ResultHead
    data: U8


class RetainedResults:
    """A chain of results: each follows on the one before. Runs on the loop thread; copies beside it."""

    def __init__(self, background: Executor, directory: Path | None = None) -> None:
        """directory: for what exceeds the memory; None: the system's for temporary files."""
        self._background = background
        self.spool = Spool(directory)
        self._start: tuple[int, bytes] | None = None  # (epoch, lineage) that the first one follows on
        self._chain: deque[KeptResult] = deque()
        self.state_bytes = 0  # of the state that they follow on

    def __bool__(self) -> bool:
        return self._start is not None

    @property
    def nbytes(self) -> int:
        """All that is kept."""
        return sum(kept.data.nbytes for kept in self._chain)

    def begin(self, standing: tuple[int, bytes], committed: Sequence[tuple[ResultHead, U8]]) -> None:
        """Keep what follows from now on. committed: results that follow on `standing` and are yet to be
        applied.
        """
        self.clear()
        self._start = standing
        for head, data in committed:
            if (head.epoch, head.before) == self.end:
                self.add(head, data)

    def clear(self) -> None:
        """Keep nothing any more."""
        self._start = None
        self._chain.clear()

    @property
    def end(self) -> tuple[int, bytes] | None:
        """(epoch, lineage) where the chain leads."""
        if self._chain:
            last = self._chain[-1].head
            return last.epoch + 1, last.lineage
        return self._start

    @property
    def last(self) -> int:
        """The epoch of the last result; that before all of them when there is none."""
        return -1 if self.end is None else self.end[0] - 1

    def add(self, head: ResultHead, data: U8) -> bool:
        """A round was committed. False: it does not follow, or is too much; then nothing is kept."""
        if (head.epoch, head.before) != self.end:
            self.clear()
            return False
        kept = KeptResult(head, data)
        self._chain.append(kept)
        if self.nbytes > max(MOST_BYTES, MOST_STATES * self.state_bytes):
            logger.warning(
                "%s of results wait for a newcomer, which is too much: it has to begin anew",
                size(self.nbytes),
            )
            self.clear()
            return False
        self._background.submit(self._settle, kept, self.nbytes > MEMORY_BYTES)
        return True

    def _settle(self, kept: KeptResult, to_disk: bool) -> None:
        """Out of the memory that the rounds use."""
        if to_disk:
            try:
                kept.data = self.spool.put(kept.data)
                return
            except OSError as error:
                logger.warning(
                    "results wait in memory for a newcomer, and there is no place on disk (%s)", error
                )
        kept.data = kept.data.copy()

    def reaches(self, epoch: int, lineage: bytes) -> bool:
        """Whether all results that follow on (epoch, lineage) are here."""
        return (epoch, lineage) == self._start or any(
            (kept.head.epoch + 1, kept.head.lineage) == (epoch, lineage) for kept in self._chain
        )

    def spares_state(self, epoch: int, lineage: bytes) -> bool:
        """Whether whoever stands at (epoch, lineage) needs these results alone: they are all that it lacks,
        and few, or less than the state.
        """
        if not self.reaches(epoch, lineage):
            return False
        few = len(self.since(epoch)) <= MOST_BEHIND
        return few or self.bytes_since(epoch) <= self.state_bytes

    def leads_by(self, epoch: int, lineage: bytes) -> bool:
        """Whether whoever stands at (epoch, lineage) is on the way of the chain, as far as it is kept."""
        before_all = self._start is not None and epoch < self._start[0]
        return before_all or self.reaches(epoch, lineage)

    def since(self, epoch: int) -> list[ResultHead]:
        """The results from this epoch on, in order."""
        return [kept.head for kept in self._chain if kept.head.epoch >= epoch]

    def bytes_since(self, epoch: int) -> int:
        """Their size."""
        return sum(kept.data.nbytes for kept in self._chain if kept.head.epoch >= epoch)

    def get(self, lineage: bytes) -> U8 | None:
        """The bytes of the result that led to `lineage`."""
        return next((kept.data for kept in self._chain if kept.head.lineage == lineage), None)

    @staticmethod
    def has_room(nbytes: int) -> bool:
        """Whether a result of so many bytes stays in memory, when nobody downloads."""
        return nbytes <= MEMORY_BYTES

    def leave(self, most: int, coming: int) -> None:
        """Nobody downloads: keep so many of the last results, and no more than stays in memory together with
        one of `coming` bytes: of results that large none. most: below 0 none, and no chain.
        """
        if most < 0 or not self.has_room(coming):
            self.clear()
        while self._chain and (len(self._chain) > most or self.nbytes + coming > MEMORY_BYTES):
            self.forget(self._chain[0].head.epoch + 1)

    def forget(self, before: int) -> None:
        """Nobody needs the results of the epochs before this one."""
        while self._chain and self._chain[0].head.epoch < before:
            gone = self._chain.popleft().head
            self._start = gone.epoch + 1, gone.lineage
