"""The encoded result of a round: where each chunk lies, and how it becomes floats again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.plan.part import Part

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the chunks of a vector lie in its encoded form: parts in order, chunks in order, no gaps."""

    parts: tuple[Part, ...]
    chunk_elements: int
    codec: codecs.Codec

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded vector."""
        return sum(self.codec.encoded_size(count) for _, count in self.chunks())

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start element, element count) of every chunk in layout order."""
        for part in self.parts:
            for begin in range(0, part.count, self.chunk_elements):
                yield part.start + begin, min(self.chunk_elements, part.count - begin)


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """Encoded bytes and their layout. Decoding is deterministic: all peers that hold the same bytes get the
    same floats.
    """

    layout: Layout
    data: U8

    def decode_into(self, out: F32) -> None:
        """out: float32[numel], overwritten, in one call that does not hold the GIL."""
        chunks = list(self.layout.chunks())
        starts = np.array([start for start, _ in chunks], np.int64)
        counts = np.array([count for _, count in chunks], np.int64)
        sizes = np.array([self.layout.codec.encoded_size(count) for _, count in chunks], np.int64)
        codecs.decode_runs(self.layout.codec, self.data, np.cumsum(sizes) - sizes, out, starts, counts)
