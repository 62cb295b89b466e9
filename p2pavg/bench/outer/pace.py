"""Local steps of several processes in step with each other, so that an average holds as many of each."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONG_S = 0.1  # a step() that takes so long waits for a round, which may need this process
PATIENCE_S = 10.0  # for a process that computes
_POLL_S = 0.0005
_COUNT, _INSIDE = 8, 9  # bytes of a process: how many microbatches it has, and whether it is in its step()
_AWAY = (1 << 63) - 1  # the count of one that trains no more


class Pace:
    """What the processes of a run share: how many microbatches each has, in a file that they map.

    Nobody is more than a step ahead of one that computes. One that waits for a round in its `step()` is not
    waited for.
    """

    def __init__(self, path: Path, index: int, count: int) -> None:
        """path: a file of at least 9 · count bytes, all 0 when the run begins."""
        self._index, self._others = index, [other for other in range(count) if other != index]
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _INSIDE * count)
        self._steps = 0

    @staticmethod
    def make(path: Path, count: int) -> None:
        """The file, as it is before the first microbatch."""
        path.write_bytes(bytes(_INSIDE * count))

    def _count(self, index: int) -> int:
        at = _INSIDE * index
        return int.from_bytes(self._map[at : at + _COUNT], "little")

    def _write(self, count: int, inside: bool) -> None:
        at = _INSIDE * self._index
        self._map[at : at + _INSIDE] = count.to_bytes(_COUNT, "little") + bytes([inside])

    def _behind(self, index: int) -> bool:
        return self._count(index) < self._steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around `opt.step()`: it begins when no other is behind, but for those that wait for a round."""
        self._steps += 1
        self._write(self._steps, inside=False)
        begun = time.monotonic()
        seen: dict[int, float] = {}  # since when others that are behind are in their step()
        while waited := [other for other in self._others if self._behind(other)]:
            now = time.monotonic()
            for other in waited:
                if self._map[_INSIDE * other + _COUNT]:
                    seen.setdefault(other, now)
                else:
                    seen.pop(other, None)
            if all(now - seen.get(other, now) > LONG_S for other in waited) or now - begun > PATIENCE_S:
                break
            time.sleep(_POLL_S)
        self._write(self._steps, inside=True)
        try:
            yield
        finally:
            self._write(self._steps, inside=False)

    def end(self) -> None:
        """Nobody waits for this process any more."""
        self._write(_AWAY, inside=False)
        self._map.close()
