"""Bytes as LZ4 blocks, where packing takes less time than a link or a disk needs for what it spares.

Who unpacks knows how many bytes there are to be: a block that claims more, or holds less, is malformed, and
nothing is allocated for what it claims. The pump has the same rule in stream_send.cpp.
"""

from __future__ import annotations

import time
from functools import cache

import lz4.block
import numpy as np

WORTH = 0.9  # of a chunk's bytes: what is not shorter than that goes as it is
_SAMPLED, _SAMPLES = 256, 16
_TRIED = 64 << 10


def packed(body: memoryview, rate: float) -> bytes | None:
    """The block instead of a chunk, for a link or a disk of `rate` bytes/s; empty when all bytes are zero.
    None: the chunk goes as it is. rate: 0 when it is not known.
    """
    if not len(body):
        return None
    left = 1.0 if rate >= speed() and any(body[:_SAMPLED]) else sample(body)
    if not left:
        return b""
    if left > WORTH or rate >= speed() * (1.0 - left):
        return None
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
