"""One newcomer on one link, as its donor sees it: what it waits for, state or results first. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

STATE_SHARE = 3  # bytes of state for each byte of results, while both wait
QUEUED_CHUNKS = 4  # of one download that are with the engine at a time; more of them, if they are
QUEUED_BYTES = 1 << 20  # together less than this: streams over a long trip take a chunk each
IDLE_S = 15.0  # seconds: a download that asks for nothing for so long is over
NO_CHUNK_S = 120.0  # seconds: a download of which no chunk leaves for so long is over
SLOWEST_BPS = 2e3  # bytes/s: a download that takes less is over, once NO_CHUNK_S have passed


def queued(size: int) -> int:
    """How many chunks of this size are with the engine at a time."""
    return max(QUEUED_CHUNKS, QUEUED_BYTES // max(1, size))


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that a newcomer asked for."""

    transfer: int
    chunk: int
    data: memoryview


@dataclass(slots=True)
class Download:
    """What goes out to one newcomer."""

    position: int  # the epoch of the next result that it lacks
    began_at: float
    moved_at: float
    root: bytes | None  # of the state that it downloads; None: results are enough
    asked: Counter[bytes] = field(default_factory=Counter)  # chunks, by root or lineage
    sent_bytes: int = 0
    _transfer: int = -1  # of the state
    _state: deque[Piece] = field(default_factory=deque)
    _results: deque[Piece] = field(default_factory=deque)
    _with_engine: Counter[int] = field(default_factory=Counter)  # chunks, by transfer
    _balance: int = 0  # bytes of state that results have to wait for; negative: the other way round

    @property
    def waits(self) -> int:
        """Chunks that wait here."""
        return len(self._state) + len(self._results)

    def is_over(self, now: float) -> bool:
        """It has stopped, or only keeps others waiting."""
        paused = now - self.moved_at
        slow = now - self.began_at > NO_CHUNK_S + self.sent_bytes / SLOWEST_BPS
        working = self._with_engine.total() > 0
        return (slow and working) or paused > (NO_CHUNK_S if working else IDLE_S)

    def ask_state(self, pieces: Sequence[Piece]) -> None:
        """Chunks of the state; those of another transfer are not wanted any more."""
        for transfer in {piece.transfer for piece in pieces} - {self._transfer}:
            self._state.clear()
            self._with_engine.pop(self._transfer, None)
            self._transfer = transfer
        self._state.extend(pieces)

    def ask_result(self, pieces: Sequence[Piece]) -> None:
        """Chunks of a result."""
        self._results.extend(pieces)

    def take(self) -> Piece | None:
        """The next that goes out; None: nothing waits, or enough is with the engine."""
        both = bool(self._state) and bool(self._results)
        if not both:
            self._balance = 0
        first = self._state if self._state and (not both or self._balance > 0) else self._results
        if not first or self._with_engine.total() >= queued(len(first[0].data)):
            return None
        piece = first.popleft()
        if both:
            size = len(piece.data)
            self._balance += -size if first is self._state else STATE_SHARE * size
        self._with_engine[piece.transfer] += 1
        self.sent_bytes += len(piece.data)
        return piece

    def gone(self, transfer: int, now: float) -> bool:
        """The engine handed one to the kernel; whether it was one of ours."""
        if not self._with_engine[transfer]:
            return False
        self._with_engine[transfer] -= 1
        self.moved_at = now
        return True
