"""The way of a flat gradient between an accelerator and the rounds, which know host memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2pavg import codecs
from p2pavg.allreduce.encoded import EncodedResult
from p2pavg.allreduce.encoding import DeviceGradient, Encodable, Encoding, Owed
from p2pavg.allreduce.feedback import BYTES
from p2pavg.codecs import Codec
from p2pavg.codecs import cuda as device
from p2pavg.optim.tree import U8

HEADERS = 1.02  # encoded chunks have headers, whose size depends on where parts begin


class GradientPath(Protocol):
    """The interface of a path. float32[numel] vectors are on the accelerator."""

    def allocate(self, nbytes: int) -> U8:
        """uint8[nbytes] of host memory that the accelerator reaches at full speed."""

    def gradient(self, vector: torch.Tensor) -> DeviceGradient:
        """The vector as it is after what the current stream was given so far, for the rounds."""

    def decode(self, result: EncodedResult, vector: torch.Tensor) -> None:
        """vector <- result, before whatever the current stream is given from now on."""

    def fork(self) -> None:
        """`aside` comes after what the current stream was given so far."""

    def aside(self) -> AbstractContextManager[None]:
        """Run the block's work on another stream, done at its end. Not for the training thread."""


PathOpener = Callable[[torch.device, int], GradientPath | None]
"""(device, numel) -> the path, or None where gradients must go through the host as floats."""


@dataclass(frozen=True, slots=True)
class _CudaEncoding:
    """A contribution on its way to the host."""

    data: U8
    transfer: device.Transfer
    chunks: int

    def chunks_done(self) -> int:
        return self.transfer.chunks_done()

    def failed(self) -> bool:
        return False

    def finite(self) -> bool:
        return self.transfer.wait()

    def whole(self) -> bool:
        return self.chunks_done() == self.chunks and self.finite()


@dataclass(frozen=True, slots=True)
class _HostEncoding:
    """A contribution that was encoded on the host."""

    data: U8
    chunks: int
    all_finite: bool

    def chunks_done(self) -> int:
        return self.chunks

    def failed(self) -> bool:
        return False

    def finite(self) -> bool:
        return self.all_finite

    def whole(self) -> bool:
        return self.all_finite


@dataclass(frozen=True, slots=True)
class _CudaGradient:
    path: CudaPath
    vector: torch.Tensor
    written: torch.cuda.Event

    owed: Owed | None = None

    def with_feedback(self, owed: Owed) -> Encodable:
        return replace(self, owed=owed)

    def encode(self, codec: Codec, parts: Sequence[tuple[int, int]], chunk: int, scale: float) -> Encoding:
        path, owed = self.path, self.owed
        longest = min(chunk, max((count for _, count in parts), default=0))
        reached = owed is None or (device.is_pinned(owed.before) and device.is_pinned(owed.after))
        if codec.encoded_size(longest) > device.SLOT_BYTES or not reached:
            return self._encode_on_host(codec, parts, chunk, scale)
        out = path.allocate(device.encoded_bytes(codec, parts, chunk))
        feedback = None if owed is None else (owed.before, owed.after, owed.share)
        transfer = path.staging.download(codec, self.vector, parts, chunk, scale, out, self.written, feedback)
        return _CudaEncoding(out, transfer, sum(-(-count // chunk) for _, count in parts))

    def _encode_on_host(
        self, codec: Codec, parts: Sequence[tuple[int, int]], chunk: int, scale: float
    ) -> Encoding:
        """For chunks beyond what is staged, as when a peer leaves, whose sums travel as one; and for
        residuals from before the model came to this device. Waits.
        """
        self.written.synchronize()
        values = self.vector.cpu().numpy()
        out = np.empty(device.encoded_bytes(codec, parts, chunk), np.uint8)
        at, chunks, finite = 0, 0, True
        for start, count in parts:
            for first in range(start, start + count, chunk):
                source = values[first : min(first + chunk, start + count)]
                sent = out[at : at + codec.encoded_size(len(source))]
                finite &= self._encode_chunk(codec, first, source, scale, sent)
                at, chunks = at + len(sent), chunks + 1
        return _HostEncoding(out, chunks, finite)

    def _encode_chunk(
        self, codec: Codec, start: int, values: npt.NDArray[np.float32], scale: float, out: U8
    ) -> bool:
        if self.owed is None:
            return codec.encode(values, out, scale)
        place = slice(BYTES * start, BYTES * (start + len(values)))
        owed = self.owed
        return codecs.encode_feedback(
            codec, values, scale, owed.before[place], owed.share, out, owed.after[place]
        )


def _whole(codec: Codec, numel: int) -> int:
    """The most bytes of the encoded vector, wherever parts begin."""
    return int(HEADERS * device.encoded_bytes(codec, [(0, numel)], 1 << 17)) + (1 << 16)


class CudaPath:
    """Chunks are scaled, checked and encoded on the device, and copied into page-locked memory, on streams of
    their own. Uses `device.SLOTS` * `device.SLOT_BYTES` of device memory.
    """

    def __init__(self, place: torch.device, numel: int, codec: Codec) -> None:
        self.staging = device.GradientStaging(place)
        self._pool = device.PinnedPool()
        self._stream = torch.cuda.Stream(self.staging.device)  # type: ignore[no-untyped-call]
        self._forked: torch.cuda.Event | None = None
        # What one epoch needs at once: a contribution, its result, and the result before, still in use.
        # Later, locking would hold a round up.
        result = codecs.for_results(codec)
        reserve = [self._pool.take(_whole(it, numel)) for it in (codec, result, result)]
        del reserve

    def allocate(self, nbytes: int) -> U8:
        return self._pool.take(nbytes)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.staging.device))
        return event

    def gradient(self, vector: torch.Tensor) -> DeviceGradient:
        return _CudaGradient(self, vector, self._event())

    def decode(self, result: EncodedResult, vector: torch.Tensor) -> None:
        layout = result.layout
        parts = [(part.start, part.count) for part in layout.parts]
        transfer = self.staging.upload(layout.codec, result.data, parts, layout.chunk_elements, 1.0, vector)
        transfer.hold(torch.cuda.current_stream(self.staging.device))
        transfer.wait()  # the result's memory is the caller's again

    def fork(self) -> None:
        self._forked = self._event()

    @contextmanager
    def aside(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            if self._forked is not None:
                self._stream.wait_event(self._forked)
            try:
                yield
            finally:
                self._stream.synchronize()


def open_cuda_path(compression: str | Codec) -> PathOpener:
    """Opens paths for a run with this compression."""
    codec = codecs.get(compression)

    def opener(place: torch.device, numel: int) -> GradientPath | None:
        if place.type != "cuda" or not device.usable(codec):
            return None
        return CudaPath(place, numel, codec)

    return opener
