"""What a run of float32 looks like on the wire.

A codec turns n float32 into bytes that carry their own scales, so that a chunk can be decoded without
anything else. Native kernels and the Python twin (`codecs_twin`) produce the same bytes. Layouts,
little-endian; headers are padded with zeros to a multiple of 64 bytes:

| codec | header | body | error of one value x in a block whose largest magnitude is m |
|---|---|---|---|
| none | – | n float32 | 0 |
| fp16 | int8 exponent e per 4096 elements | n float16 of x·2^e | max(|x|·2^-11, m·2^-39) |
| bf16 | – | n bfloat16, saturating | |x|·2^-8 |
| int8 | float32 step per 1024 elements | n int8 of x/step | m/254 |

The exponent of fp16 puts the largest magnitude of a block into [2^14, 2^15): sums never overflow, small
means never vanish. In int8, blocks whose m is under 2^-112, before or after scaling, become zeros. An
infinity stays infinite and NaN stays NaN (in int8 their whole block becomes NaN), and `encode` and
`decode_add` say so by returning False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from p2pavg import codecs_twin, native
from p2pavg.errors import ConfigurationError
from p2pavg.native import Buffer

F32: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.int64]

WIRE_IDS = {"none": 0, "fp16": 1, "bf16": 2, "int8": 3}


@runtime_checkable
class Codec(Protocol):
    """How n float32 travel. Implement it to bring your own; take a `wire_id` from 64 to 255.

    F32 arguments are contiguous 1-D float32 arrays in host memory, buffers are contiguous bytes.
    Methods are called from several threads at once.
    """

    @property
    def name(self) -> str:
        """What people call it; peers of one run must use the same."""

    @property
    def wire_id(self) -> int:
        """What frames call it: one byte."""

    def encoded_size(self, n: int) -> int:
        """Bytes for n elements: exact, and a function of n only."""

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        """dst <- encode(src·scale), `encoded_size(len(src))` bytes; True when every src·scale is finite."""

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        """dst <- decode(src)·scale."""

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        """acc += weight·decode(src); True when every term is finite, else acc is spoiled."""


@dataclass(frozen=True)
class NativeCodec:
    """A built-in codec on the C++ kernels. All calls release the GIL."""

    name: str
    wire_id: int

    def encoded_size(self, n: int) -> int:
        return codecs_twin.encoded_size(self.wire_id, n)

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        return bool(native.module().encode(self.wire_id, src, dst, scale))

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        native.module().decode(self.wire_id, src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return bool(native.module().decode_add(self.wire_id, src, acc, weight))


@dataclass(frozen=True)
class TwinCodec:
    """A built-in codec in NumPy (and torch for float16): the same bytes, slower."""

    name: str
    wire_id: int

    def encoded_size(self, n: int) -> int:
        return codecs_twin.encoded_size(self.wire_id, n)

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        return codecs_twin.encode(self.wire_id, src, dst, scale)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        codecs_twin.decode(self.wire_id, src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return codecs_twin.decode_add(self.wire_id, src, acc, weight)


@dataclass(frozen=True)
class StochasticInt8:
    """int8 that rounds up or down by chance, so that the expected error is 0; decoded as int8.

    Element i of a run draws from a counter RNG keyed by (seed, epoch, first + i): the same on every machine.
    """

    seed: int
    epoch: int
    first: int = 0
    name: str = "int8"
    wire_id: int = WIRE_IDS["int8"]

    def encoded_size(self, n: int) -> int:
        return codecs_twin.encoded_size(self.wire_id, n)

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        key = (self.seed, self.epoch, self.first)
        if native.available():
            return bool(native.module().encode_int8_stochastic(src, dst, scale, *key))
        return codecs_twin.encode(self.wire_id, src, dst, scale, key)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        get(self.name).decode(src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return get(self.name).decode_add(src, acc, weight)


_BUILT_IN: dict[str, Codec] = {
    name: (NativeCodec if native.available() else TwinCodec)(name, wire_id)
    for name, wire_id in WIRE_IDS.items()
}


def get(codec: str | Codec) -> Codec:
    """The codec of this name ("none", "fp16", "bf16", "int8"), or the given object, checked."""
    if isinstance(codec, str):
        try:
            return _BUILT_IN[codec]
        except KeyError:
            known = ", ".join(_BUILT_IN)
            raise ConfigurationError(f"There is no compression {codec!r}; choose one of {known}.") from None
    if not isinstance(codec, Codec):
        raise ConfigurationError(f"{codec!r} is not a Codec; it lacks a member of p2pavg.codecs.Codec.")
    if not 0 <= codec.wire_id <= 255:
        raise ConfigurationError(
            f"Codec {codec.name!r} has wire_id {codec.wire_id}; choose one from 64 to 255."
        )
    return codec


def prepare(codec: str | Codec) -> None:
    """Load now what the codec needs: the twin's float16 takes torch, whose import no event loop may wait for.

    Raises ConfigurationError like `get`.
    """
    if isinstance(get(codec), TwinCodec) and get(codec).name in ("fp16", "int8"):  # int8 returns as fp16
        codecs_twin.load_torch()


def is_built_in(codec: Codec) -> bool:
    """Whether the native pump knows this codec by its wire id."""
    return codec.wire_id in WIRE_IDS.values()


def decode_runs(
    codec: Codec,
    src: Buffer,
    src_offsets: Indices,
    dst: F32,
    dst_offsets: Indices,
    counts: Indices,
    scale: float = 1.0,
) -> None:
    """Decode many runs of one buffer in one call, without the GIL: a whole result into a whole gradient.

    Run i starts at byte `src_offsets[i]`, has `counts[i]` elements and goes to `dst[dst_offsets[i]:]`; the
    three are int64 arrays of one length. ValueError when a run lies outside its buffers.
    """
    if native.available() and is_built_in(codec):
        native.module().decode_runs(codec.wire_id, src, src_offsets, dst, dst_offsets, counts, scale)
        return
    view = memoryview(src).cast("B")
    for start, to, n in zip(src_offsets.tolist(), dst_offsets.tolist(), counts.tolist(), strict=True):
        size = codec.encoded_size(n)
        if min(start, to, n) < 0 or start + size > len(view) or to + n > len(dst):
            raise ValueError(f"the run of {n} elements at byte {start} lies outside its buffers")
        codec.decode(view[start : start + size], dst[to : to + n], scale)


def mean_encode(
    codec_in: Codec,
    inputs: Sequence[Buffer],
    weights: Sequence[float],
    n: int,
    scale: float,
    codec_out: Codec,
    dst: Any,
) -> bool:
    """dst <- encode(scale · sum of weights[i]·decode(inputs[i])), summed in order; True when all are finite.

    For an owner that keeps the contributions to a chunk instead of adding each on arrival: no accumulator in
    memory is read or written. Equal to the bit to decode_add into zeros followed by encode.
    """
    if len(inputs) != len(weights):
        raise ValueError("there must be one weight per input")
    if native.available() and is_built_in(codec_in) and is_built_in(codec_out):
        done = native.module().mean_encode(
            codec_in.wire_id, list(inputs), list(weights), n, scale, codec_out.wire_id, dst
        )
        return bool(done)
    total = np.zeros(n, np.float32)
    for data, weight in zip(inputs, weights, strict=True):
        codec_in.decode_add(data, total, weight)
    return codec_out.encode(total, dst, scale)


class ErrorFeedback:
    """What rounding took from this peer's contribution, added to the next: over epochs int8 has no bias.

    Holds one float32 residual per element. `encode` never changes it, so an attempt can be repeated; `commit`
    makes the loss of the committed attempt the residual, from the same gradient, untouched until then.
    """

    def __init__(self, codec: Codec, n: int) -> None:
        self.codec = codec
        self.residual: F32 = np.zeros(n, np.float32)

    def encode(self, start: int, src: F32, dst: Buffer, scale: float) -> bool:
        """dst <- encode(src·scale + residual) for the chunk of len(src) elements that begins at `start`."""
        return self.codec.encode(self._wanted(start, src, scale), dst, 1.0)

    def commit(self, start: int, src: F32, scale: float) -> None:
        """Keep what `encode` with these arguments lost; nothing when the chunk was not finite."""
        wanted = self._wanted(start, src, scale)
        encoded = np.empty(self.codec.encoded_size(len(src)), np.uint8)
        if self.codec.encode(wanted, encoded, 1.0):
            sent = np.empty_like(wanted)
            self.codec.decode(encoded, sent)
            np.subtract(wanted, sent, out=self.residual[start : start + len(src)])

    def _wanted(self, start: int, src: F32, scale: float) -> F32:
        wanted = src * np.float32(scale)
        wanted += self.residual[start : start + len(src)]
        return wanted
