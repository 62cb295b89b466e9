"""Chunks as LZ4 blocks, where that takes less time than it saves; the pump does so in stream_send.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import lz4.block
import numpy as np

from p2pavg.native import crc32
from p2pavg.transport.python.buffers import BufferPool
from p2pavg.transport.python.stream import Destination

WORTH = 0.9  # of a chunk's bytes: what is not shorter than that goes as it is
_SAMPLED, _SAMPLES = 256, 16
_TRIED = 64 << 10


def packed(body: memoryview, rate: float) -> bytes | None:
    """The block to send instead of a chunk over a link of `rate` bytes/s; empty when all its bytes are zero.
    None: the chunk goes as it is. rate: 0 when it is not known.
    """
    if rate >= speed():
        return None
    left = sample(body)
    if left > WORTH or rate >= speed() * (1.0 - left):
        return None
    if not left:
        return b""
    block: bytes = lz4.block.compress(body, store_size=False)
    return block if len(block) <= WORTH * len(body) else None


def unpack(block: memoryview, whole: memoryview) -> bool:
    """whole <- what the block holds. False when that is not as long, or the block is malformed."""
    if not block:
        whole[:] = bytes(len(whole))
        return True
    try:
        found = lz4.block.decompress(block, uncompressed_size=len(whole))
    except lz4.block.LZ4BlockError:
        return False
    if len(found) != len(whole):
        return False
    whole[:] = found
    return True


def sample(body: memoryview) -> float:
    """How much of the bytes is left when they are packed, as some of them tell: 0 when all are zero."""
    data = np.frombuffer(body, np.uint8)
    if not data[:_SAMPLED].any() and not data.any():
        return 0.0
    if len(data) > _SAMPLED * _SAMPLES:
        starts = (len(data) - _SAMPLED) * (2 * np.arange(_SAMPLES) + 1) // (2 * _SAMPLES)
        data = np.concatenate([data[start : start + _SAMPLED] for start in starts.tolist()])
    return min(1.0, len(lz4.block.compress(data.data, store_size=False)) / len(data))


@cache
def speed() -> float:
    """Bytes/s that this processor packs, half of them zeros; measured once, in some milliseconds."""
    data = np.random.default_rng(0).integers(0, 256, (_TRIED // 1024, 2, 512), np.uint8)
    data[:, 1] = 0
    best = 1.0
    for _ in range(5):
        begun = time.perf_counter()
        lz4.block.compress(data.reshape(-1).data, store_size=False)
        best = min(best, time.perf_counter() - begun)
    return _TRIED / best


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
