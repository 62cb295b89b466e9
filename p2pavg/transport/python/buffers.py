"""Reused byte buffers: a fresh array per chunk would be mapped and zeroed page by page each time."""

from __future__ import annotations

import numpy as np

from p2pavg.transport.engine import U8

_SMALLEST = 4096


class BufferPool:
    """Hands out uint8 arrays of power-of-two capacity; keeps at most `keep_bytes` of returned ones."""

    def __init__(self, keep_bytes: int = 64 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._free: dict[int, list[U8]] = {}

    def take(self, nbytes: int) -> U8:
        """An array with len >= nbytes and undefined contents; give it back with `give`."""
        capacity = max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        free = self._free.get(capacity)
        if free:
            self._kept_bytes -= capacity
            return free.pop()
        return np.empty(capacity, np.uint8)

    def give(self, buffer: U8) -> None:
        """Return an array that `take` handed out, once nobody reads or writes it any more."""
        if self._kept_bytes + len(buffer) <= self._keep_bytes:
            self._kept_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
