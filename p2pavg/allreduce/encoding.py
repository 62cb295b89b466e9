"""Contributions that are encoded before the engine has them: on an accelerator, or by a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from p2pavg.codecs import Codec

logger = logging.getLogger("p2pavg.rounds")
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Run = tuple[int, int]  # (start, count) of elements


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

    def whole(self) -> bool:
        """Whether all chunks are in place, and were finite. Does not wait."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What averages lack of earlier contributions, and where what they lack after this one is written."""

    before: U8  # bfloat16[numel]; unchanged while the contribution is encoded
    after: U8  # bfloat16[numel]
    share: float  # own weight / all weights


class Encodable(Protocol):
    """A flat gradient that is encoded where it is."""

    def encode(self, codec: Codec, parts: Sequence[Run], chunk: int, scale: float) -> Encoding:
        """Begin to encode gradient * scale: parts of (start, count) elements in chunks of `chunk`. Does not
        wait."""


class DeviceGradient(Encodable, Protocol):
    """A flat gradient on an accelerator."""

    def with_feedback(self, owed: Owed) -> Encodable:
        """The same gradient, encoded as `codecs.encode_feedback` does it."""


EncodeChunk = Callable[[Codec, int, F32, float, U8], bool]
"""(codec, start, values, scale, out): out <- the encoded values * scale, which are the elements from `start`
on; whether all were finite."""


class HostGradient:
    """A gradient in host memory whose chunks take more than a codec to encode."""

    def __init__(self, source: F32, encode_chunk: EncodeChunk, allocate: Callable[[int], U8]) -> None:
        self._source = source
        self._encode_chunk = encode_chunk
        self._allocate = allocate

    def encode(self, codec: Codec, parts: Sequence[Run], chunk: int, scale: float) -> HostEncoding:
        """As `Encodable`."""
        runs = [
            (start + at, min(chunk, count - at)) for start, count in parts for at in range(0, count, chunk)
        ]
        data = self._allocate(sum(codec.encoded_size(count) for _, count in runs))
        return HostEncoding(codec, runs, self._source, scale, self._encode_chunk, data)


class HostEncoding:
    """An `Encoding` by a thread of its own."""

    def __init__(
        self,
        codec: Codec,
        runs: Sequence[Run],
        source: F32,
        scale: float,
        encode_chunk: EncodeChunk,
        data: U8,
    ) -> None:
        self.data = data
        self._codec = codec
        self._runs = runs
        self._source = source
        self._scale = scale
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
            for start, count in self._runs:
                if self._stopped.is_set():
                    return
                out = self.data[at : at + self._codec.encoded_size(count)]
                values = self._source[start : start + count]
                self._finite &= self._encode_chunk(self._codec, start, values, self._scale, out)
                at += len(out)
                self._done += 1
        except Exception:  # of a codec that somebody else wrote; the round ends without this contribution
            self._failed = True
            logger.exception("the codec %r cannot encode this gradient", self._codec.name)
