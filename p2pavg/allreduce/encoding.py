"""Contributions that are encoded before the engine has them: on an accelerator, or by a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2pavg import codecs
from p2pavg.codecs import Codec

logger = logging.getLogger("p2pavg.rounds")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Run = tuple[int, int]  # (start, count) of elements

LOOK_S = 0.0005  # between two looks at what an accelerator has brought


class Encoding(Protocol):
    """A gradient that is being encoded into host memory, chunk by chunk, in layout order."""

    @property
    def data(self) -> U8:
        """The encoded chunks without gaps; unchanged from when they are in place."""

    def chunks_done(self) -> int:
        """How many are in place, from the first. Does not wait."""

    def failed(self) -> bool:
        """Whether no more chunks will come, though some are missing. Does not wait."""

    def finite(self) -> bool:
        """Whether all values were finite. Waits for the last chunk."""


class Encodable(Protocol):
    """A flat gradient that is encoded where it is."""

    def encode(self, codec: Codec, parts: Sequence[Run], chunk: int, scale: float) -> Encoding:
        """Begin to encode gradient * scale: parts of (start, count) elements in chunks of `chunk`. Does not
        wait."""


EncodeChunk = Callable[[Codec, int, F32, float, U8], bool]
"""(codec, start, values, scale, out): out <- the encoded values * scale, which are the elements from `start`
on; whether all were finite."""


class HostGradient:
    """A gradient, in host memory or on an accelerator, whose chunks take more than a codec to encode."""

    def __init__(
        self, source: F32 | Encodable, encode_chunk: EncodeChunk, allocate: Callable[[int], U8]
    ) -> None:
        self._source = source
        self._encode_chunk = encode_chunk
        self._allocate = allocate

    def encode(self, codec: Codec, parts: Sequence[Run], chunk: int, scale: float) -> HostEncoding:
        """As `Encodable`. One from an accelerator comes as floats."""
        given = self._source
        runs = [
            (start + at, min(chunk, count - at)) for start, count in parts for at in range(0, count, chunk)
        ]
        source: F32 | Encoding = (
            given if isinstance(given, np.ndarray) else given.encode(codecs.get("none"), parts, chunk, scale)
        )
        data = self._allocate(sum(codec.encoded_size(count) for _, count in runs))
        return HostEncoding(codec, runs, source, scale, self._encode_chunk, data)


class HostEncoding:
    """An `Encoding` by a thread of its own."""

    def __init__(
        self,
        codec: Codec,
        runs: Sequence[Run],
        source: F32 | Encoding,
        scale: float,
        encode_chunk: EncodeChunk,
        data: U8,
    ) -> None:
        """source: float32[numel], or its scaled runs, one after the other."""
        self.data = data
        self._codec = codec
        self._runs = runs
        self._source = source
        self._scale = scale if isinstance(source, np.ndarray) else 1.0
        self._encode_chunk = encode_chunk
        self._done = 0
        self._finite = True
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="p2pavg-encode", daemon=True)
        self._thread.start()

    def chunks_done(self) -> int:
        return self._done

    def failed(self) -> bool:
        return self._failed

    def finite(self) -> bool:
        self._thread.join()
        return self.whole()

    def whole(self) -> bool:
        """Whether all chunks are in place, and were finite."""
        return self._done == len(self._runs) and self._finite

    def stop(self) -> None:
        """Read and write nothing any more. Waits for the chunk at hand."""
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        at = 0
        try:
            for (start, count), values in zip(self._runs, self._values(), strict=False):
                out = self.data[at : at + self._codec.encoded_size(count)]
                self._finite &= self._encode_chunk(self._codec, start, values, self._scale, out)
                at += len(out)
                self._done += 1
        except Exception:  # of a codec that somebody else wrote; the round ends without this contribution
            self._failed = True
            logger.exception("the codec %r cannot encode this gradient", self._codec.name)

    def _values(self) -> Iterator[F32]:
        """The runs, until it is stopped."""
        source, at = self._source, 0
        for number, (start, count) in enumerate(self._runs):
            while not isinstance(source, np.ndarray) and source.chunks_done() <= number:
                if self._stopped.wait(LOOK_S):
                    return
            if self._stopped.is_set():
                return
            if isinstance(source, np.ndarray):
                yield source[start : start + count]
            else:
                yield source.data[4 * at : 4 * (at + count)].view(np.float32)
            at += count
