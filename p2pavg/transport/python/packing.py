"""Chunks that come as LZ4 blocks, on their way to where the whole chunks belong."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.blocks import unpack
from p2pavg.native import crc32
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.stream import Destination


class Packed:
    """Where a packed chunk goes: into a buffer, and from there to where the whole chunk belongs."""

    def __init__(
        self, whole: Destination, length: int, pool: BufferPool, refuse: Callable[[str], None]
    ) -> None:
        """refuse(why): the block does not hold the chunk."""
        self._whole = whole
        self._pool = pool
        self._refuse = refuse
        self._buffer = pool.take(length)
        self.view = self._buffer[:length].data

    def landed(self, crc: int) -> None:
        fits = unpack(self.view, self._whole.view)
        self._pool.give(self._buffer)
        if fits:
            self._whole.landed(crc32(self._whole.view))
        else:
            self._whole.lost()
            self._refuse("a packed chunk that does not unpack to its size")

    def lost(self) -> None:
        self._pool.give(self._buffer)
        self._whole.lost()
