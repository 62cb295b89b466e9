"""How samples are compressed between the offline and the online steps."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import lz4.frame


@dataclass(frozen=True)
class Compression:
    """A compression of bytes."""

    name: str
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def available() -> list[Compression]:
    """None, lz4, zlib; zstd where the package `zstandard` is installed."""
    ways = [
        Compression("none", bytes, bytes),
        Compression("lz4", lz4.frame.compress, lz4.frame.decompress),
        Compression("zlib", lambda data: zlib.compress(data, 1), zlib.decompress),
    ]
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        return ways
    return [
        *ways,
        Compression("zstd", zstandard.ZstdCompressor().compress, zstandard.ZstdDecompressor().decompress),
    ]
