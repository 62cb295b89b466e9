"""The encoded result of a round: where each chunk lies, and how it becomes floats again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.plan.part import Part

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the chunks of a vector lie in its encoded form: parts in order, chunks in order, no gaps."""

    parts: tuple[Part, ...]
    chunk_elements: int
    codec: codecs.Codec
    shares: tuple[float, ...] = ()  # of an all-gather, whose parts are contributions: what each counts

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.parts[0].count if self.shares else sum(part.count for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded vector."""
        counts, _, times = _lengths(self.parts, self.chunk_elements)
        return sum(n * self.codec.encoded_size(count) for n, count in zip(times, counts, strict=True))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start element, element count) of every chunk in layout order."""
        starts, counts = _cut(self.parts, self.chunk_elements)
        return zip(starts.tolist(), counts.tolist(), strict=True)

    def sizes(self) -> I64:
        """int64[chunks]: bytes of every encoded chunk in layout order."""
        counts, places, _ = _lengths(self.parts, self.chunk_elements)
        return np.array([self.codec.encoded_size(count) for count in counts], np.int64)[places]


@lru_cache(maxsize=16)  # mostly a round has the parts of the one before
def _lengths(parts: tuple[Part, ...], chunk_elements: int) -> tuple[list[int], I64, list[int]]:
    """The lengths of chunks in elements, each once; which of them each chunk has; how many chunks have it."""
    of = _cut(parts, chunk_elements)[1]
    counts, places, times = np.unique(of, return_inverse=True, return_counts=True)
    return counts.tolist(), places, times.tolist()


@lru_cache(maxsize=16)
def _cut(parts: tuple[Part, ...], chunk_elements: int) -> tuple[I64, I64]:
    """int64[chunks] twice: the first element and the elements of every chunk in layout order."""
    starts = [np.arange(part.start, part.start + part.count, chunk_elements) for part in parts]
    ends = [np.full(len(begun), part.start + part.count) for begun, part in zip(starts, parts, strict=True)]
    begun = np.concatenate([np.zeros(0, np.int64), *starts]).astype(np.int64)
    return begun, np.minimum(chunk_elements, np.concatenate([np.zeros(0, np.int64), *ends]) - begun)


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """Encoded bytes and their layout. Decoding is deterministic: all peers that hold the same bytes get the
    same floats.
    """

    layout: Layout
    data: U8

    def decode_into(self, out: F32) -> None:
        """out: float32[numel], overwritten, by calls that do not hold the GIL."""
        if self.layout.shares:
            self._sum_into(out)
            return
        layout, sizes = self.layout, self.layout.sizes()
        starts, counts = _cut(layout.parts, layout.chunk_elements)
        codecs.decode_runs(layout.codec, self.data, np.cumsum(sizes) - sizes, out, starts, counts)

    def contribution_into(self, out: F32, rank: int) -> None:
        """out: float32[numel] <- what the member of this rank contributed to an all-gather, as all got it."""
        layout = self.layout
        for part, begin, count, at, size in self._gathered():
            if part.owner == rank:
                layout.codec.decode(self.data[at : at + size], out[begin : begin + count], 1.0)

    def _sum_into(self, out: F32) -> None:
        """The sum of all contributions, each times its share: in the order of the parts, in float32."""
        layout, shares = self.layout, dict(zip(self.layout.parts, self.layout.shares, strict=True))
        out[:] = 0
        for part, begin, count, at, size in self._gathered():
            if shares[part] > 0:
                layout.codec.decode_add(self.data[at : at + size], out[begin : begin + count], shares[part])

    def _gathered(self) -> Iterator[tuple[Part, int, int, int, int]]:
        """(part, first element, elements, first byte, bytes) of each chunk of an all-gather."""
        layout, at = self.layout, 0
        for part in layout.parts:
            for begin in range(0, part.count, layout.chunk_elements):
                count = min(layout.chunk_elements, part.count - begin)
                size = layout.codec.encoded_size(count)
                yield part, begin, count, at, size
                at += size


def shares_of(parts: Sequence[Part], weights: Sequence[float]) -> tuple[float, ...]:
    """What each part of an all-gather counts: its owner's share of all weights."""
    total = sum(weights)
    return tuple(weights[part.owner] / total for part in parts)
