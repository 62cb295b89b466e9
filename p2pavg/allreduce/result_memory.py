"""Memory for encoded results: fresh memory costs a page fault for every page, in every round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

MOST_KEPT = 2  # one is decoded while the next fills
_GRAIN = 1 << 20  # bytes: other part sizes change an encoded size a little


class ResultMemory:
    """Hands memory out again when no array looks at it any more."""

    def __init__(self, allocate: Callable[[int], U8] | None = None) -> None:
        """allocate: uint8[n] of host memory; None: ordinary memory."""
        self._allocate = allocate
        self._kept: list[U8] = []

    def take(self, nbytes: int) -> U8:
        """uint8[nbytes], of any content. It is in use as long as it, or a view of it, exists."""
        rounded = -(-nbytes // _GRAIN) * _GRAIN
        for index, kept in enumerate(map(len, self._kept)):
            if kept == rounded and _references(self._kept, index) == _UNSEEN:
                return self._kept[index][:nbytes]
        made = np.empty(rounded, np.uint8) if self._allocate is None else self._allocate(rounded)
        self._kept.append(_base(made))
        del self._kept[:-MOST_KEPT]
        return self._kept[-1][:nbytes]


def _base(memory: U8) -> U8:
    """An array that all views of it refer to: numpy lets views of a view refer to the first array."""
    return np.frombuffer(memory.data, np.uint8)


def _references(arrays: Sequence[U8], index: int) -> int:
    return sys.getrefcount(arrays[index])


_UNSEEN = _references([np.empty(0, np.uint8)], 0)
