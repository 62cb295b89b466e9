"""What a run of float32 looks like on the wire.

A codec turns n float32 into bytes that carry their own scales, so that a chunk can be decoded without
anything else. Native kernels and the Python twin (`twin`) produce the same bytes. Layouts,
little-endian; headers are padded with zeros to a multiple of 64 bytes:

| codec | header | body | error of one value x in a block whose largest magnitude is m |
|---|---|---|---|
| none | – | n float32 | 0 |
| fp16 | int8 exponent e per 4096 elements | n float16 of x·2^e | max(|x|·2^-11, m·2^-39) |
| bf16 | – | n bfloat16, saturating | |x|·2^-8 |
| int8 | float32 step per 1024 elements | n int8 of x/step | m/254 |
| int4 | float32 step per 1024 elements | n levels of x/step, -7 to 7, two to a byte, low half first | m/14 |

The exponent of fp16 puts the largest magnitude of a block into [2^14, 2^15): sums never overflow, small
means never vanish. In int8 and int4, blocks whose m is under 2^-112, before or after scaling, become zeros.
An infinity stays infinite and NaN stays NaN (in int8 and int4 their whole block becomes NaN), and `encode`
and `decode_add` say so by returning False.

The sparse codecs of outer steps keep a fixed share of the values; see `csrc/cpu/sparse.h`.

May import `report`, `native` and `errors`. Start reading here; `twin` is the arithmetic in NumPy, `sparse`
that of the sparse codecs, `cuda` the way of a gradient between a device and the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from p2pavg import kinds, native
from p2pavg.codecs import sparse, twin
from p2pavg.errors import ConfigurationError
from p2pavg.native import Buffer, compiled

F32: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.int64]

WIRE_IDS = {"none": twin.NONE, "fp16": twin.FP16, "bf16": twin.BF16, "int8": twin.INT8, "int4": twin.INT4}
SPARSE_IDS = {f"sparse-{1 << low}": sparse.SPARSE + low for low in sparse.LOW_BITS}  # of `Outer(density=)`


@runtime_checkable
class Codec(Protocol):
    """How n float32 travel. Implement it to bring your own, with a `wire_id` from 64 to 255.

    F32 arguments are contiguous 1-D float32 arrays in host memory, buffers are contiguous bytes. Methods are
    called from several threads at once, and decoding the same bytes gives the same floats on all peers. A
    codec that rounds coarsely may have `feedback = True`: then training adds what a contribution lost to the
    next one, and averages travel as fp16.
    """

    @property
    def name(self) -> str:
        """The name in messages and reports; all peers of a run use the same."""

    @property
    def wire_id(self) -> int:
        """The codec's number in frames: one byte."""

    def encoded_size(self, n: int) -> int:
        """Bytes of n encoded elements: exact, and a function of n alone.

        Args:
            n: elements, at least 1.
        """

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        """dst <- encode(src·scale).

        Args:
            src: float32[n].
            dst: `encoded_size(n)` bytes.
            scale: a power of two.

        Returns:
            Whether every element of src·scale is finite.
        """

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        """dst <- decode(src)·scale.

        Args:
            src: `encoded_size(n)` bytes.
            dst: float32[n].
            scale: any float.
        """

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        """acc += weight·decode(src).

        Args:
            src: `encoded_size(n)` bytes.
            acc: float32[n].
            weight: any float.

        Returns:
            Whether every term is finite; if not, `acc` holds nothing of use.
        """


@dataclass(frozen=True)
class _BuiltIn:
    name: str
    wire_id: int

    @property
    def feedback(self) -> bool:
        """Whether what a contribution lost is added to the next one."""
        return self.wire_id in twin.LEVELS

    def encoded_size(self, n: int) -> int:
        return twin.encoded_size(self.wire_id, n)


class NativeCodec(_BuiltIn):
    """A built-in codec on the C++ kernels. All calls release the GIL."""

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        return compiled.encode(self.wire_id, src, dst, scale)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        compiled.decode(self.wire_id, src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return compiled.decode_add(self.wire_id, src, acc, weight)


class TwinCodec(_BuiltIn):
    """A built-in codec in NumPy (and torch for float16): the same bytes, slower."""

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        return twin.encode(self.wire_id, src, dst, scale)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        twin.decode(self.wire_id, src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return twin.decode_add(self.wire_id, src, acc, weight)


@dataclass(frozen=True)
class StochasticInt8:
    """int8 that rounds up or down by chance, so that the expected error is 0; decoded as int8.

    Element i of a run draws from a counter RNG keyed by (seed, epoch, first + i): the same on every machine.
    Training takes `StochasticInt8(seed)`, counts epoch and elements itself, and keeps no residual. Peers with
    seeds of their own err independently of each other; they and peers with "int8" understand each other.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: part of the key, so that each epoch rounds anew.
        first: the number of the first element.

    Raises:
        ConfigurationError: for a seed that is no whole number in that range.
    """

    seed: int
    epoch: int = 0
    first: int = 0
    name: str = "int8"
    wire_id: int = twin.INT8

    def __post_init__(self) -> None:
        for part in ("seed", "epoch", "first"):
            kinds.check_whole(f"StochasticInt8({part}=...)", getattr(self, part), 0, 2**64 - 1)

    def at(self, epoch: int, first: int) -> StochasticInt8:
        """The same codec for a run of elements.

        Args:
            epoch: the epoch in which it is encoded.
            first: the number of its first element.
        """
        return replace(self, epoch=epoch, first=first)

    def encoded_size(self, n: int) -> int:
        return twin.encoded_size(self.wire_id, n)

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        key = (self.seed, self.epoch, self.first)
        if native.available():
            return compiled.encode_int8_stochastic(src, dst, scale, *key)
        return twin.encode(self.wire_id, src, dst, scale, key)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        get(self.name).decode(src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return get(self.name).decode_add(src, acc, weight)


class _Sparse(_BuiltIn):
    """A codec that keeps a fixed share of the values, the largest. What travels so is never summed on the
    way: all members get all contributions.
    """

    @property
    def density(self) -> float:
        """The share of the values that is sent."""
        return 2.0 ** (sparse.SPARSE - self.wire_id)

    def encoded_size(self, n: int) -> int:
        return sparse.encoded_size(self.wire_id, n)


class NativeSparse(_Sparse, NativeCodec):
    """A sparse codec on the C++ kernels."""


class TwinSparse(_Sparse):
    """A sparse codec in NumPy: the same bytes, slower."""

    def encode(self, src: F32, dst: Buffer, scale: float) -> bool:
        return sparse.encode(self.wire_id, src, dst, scale)

    def decode(self, src: Buffer, dst: F32, scale: float = 1.0) -> None:
        sparse.decode(self.wire_id, src, dst, scale)

    def decode_add(self, src: Buffer, acc: F32, weight: float) -> bool:
        return sparse.decode_add(self.wire_id, src, acc, weight)


_dense, _sparse = (NativeCodec, NativeSparse) if native.available() else (TwinCodec, TwinSparse)
_BUILT_IN: dict[str, Codec] = {name: _dense(name, wire_id) for name, wire_id in WIRE_IDS.items()}
_BUILT_IN |= {name: _sparse(name, wire_id) for name, wire_id in SPARSE_IDS.items()}


def get(codec: str | Codec) -> Codec:
    """The codec of this name ("none", "fp16", "bf16", "int8", "int4"), or the given object, checked."""
    if codec is None or isinstance(codec, str):
        try:
            return _BUILT_IN[codec]
        except KeyError:
            known = ", ".join(WIRE_IDS)
            raise ConfigurationError(
                f"There is no compression {kinds.seen(codec)}; choose one of {known}."
            ) from None
    if isinstance(codec, type):
        raise ConfigurationError(f"{codec.__name__} is a class; give an object of it: {codec.__name__}(...).")
    if not isinstance(codec, Codec):
        raise ConfigurationError(f"{kinds.seen(codec)} is not a Codec; it lacks a member of p2pavg.Codec.")
    if isinstance(codec, (_BuiltIn, StochasticInt8)):
        return codec
    if not isinstance(codec.name, str):
        raise ConfigurationError(f"A Codec's name is a str, not {codec.name!r}.")
    if not isinstance(codec.wire_id, int) or not 64 <= codec.wire_id <= 255:
        raise ConfigurationError(
            f"Codec {codec.name!r} has wire_id {codec.wire_id!r}; choose a whole number from 64 to 255."
        )
    if codec.name in WIRE_IDS:
        raise ConfigurationError(
            f"A Codec of your own cannot be called {codec.name!r}; give it another name."
        )
    return codec


def prepare(codec: str | Codec) -> Codec:
    """As `get`, and load now what it needs: the twin's float16 takes torch, whose import no event loop may
    wait for.
    """
    if isinstance(codec, str) and codec in SPARSE_IDS:
        raise ConfigurationError(
            f"{codec!r} is no compression by itself; outer steps have it with Outer(density=)."
        )
    found = get(codec)
    returned = for_results(found)
    if isinstance(returned, TwinCodec) and returned.name == "fp16":
        twin.load_torch()
    return found


def is_built_in(codec: Codec) -> bool:
    """Whether the native pump knows this codec by its wire id."""
    return codec.wire_id in WIRE_IDS.values() or is_sparse(codec)


def is_sparse(codec: Codec) -> bool:
    """Whether contributions in this codec are exchanged, and summed by everybody."""
    return codec.wire_id in SPARSE_IDS.values()


def sparse_of(density: float) -> Codec:
    """The codec that sends this share of the values: a power of two, from 1/16 to 1/256."""
    for name, wire_id in SPARSE_IDS.items():
        if density == 2.0 ** (sparse.SPARSE - wire_id):
            return get(name)
    known = ", ".join(f"1/{1 << low}" for low in sparse.LOW_BITS)
    raise ConfigurationError(f"A density is one of {known}, not {kinds.seen(density)}.")


def is_sound(codec: Codec, src: Buffer, n: int) -> bool:
    """Whether these bytes, which somebody sent, are n finite values in a sparse codec."""
    if isinstance(codec, NativeCodec):
        return compiled.sparse_check(codec.wire_id, src, n)
    return sparse.check(codec.wire_id, src, n)


def has_feedback(codec: Codec) -> bool:
    """Whether training keeps what a contribution lost, for the next one."""
    return getattr(codec, "feedback", False) is True


def for_results(codec: Codec) -> Codec:
    """What averages travel in. Nobody keeps what those lose, so it is finer than what has feedback. Sparse
    contributions are no averages: they stay as they are.
    """
    if is_sparse(codec):
        return codec
    return get("int8") if codec.wire_id == twin.INT4 else for_handing_over(codec)


def for_handing_over(codec: Codec) -> Codec:
    """What sums of a peer that leaves travel in: whole where contributions hold so little of them."""
    if is_sparse(codec):
        return get("none")
    coarse = codec.wire_id in twin.LEVELS or has_feedback(codec)
    return get("fp16") if coarse else codec


def label(codec: Codec) -> str:
    """What peers compare: they must call a codec by the same name and the same wire id."""
    return codec.name if is_built_in(codec) else f"{codec.name} (wire id {codec.wire_id})"


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
        compiled.decode_runs(codec.wire_id, src, src_offsets, dst, dst_offsets, counts, scale)
        return
    view = memoryview(src).cast("B")
    for start, to, n in zip(src_offsets.tolist(), dst_offsets.tolist(), counts.tolist(), strict=True):
        size = codec.encoded_size(n)
        if min(start, to, n) < 0 or start + size > len(view) or to + n > len(dst):
            raise ValueError(f"the run of {n} elements at byte {start} lies outside its buffers")
        codec.decode(view[start : start + size], dst[to : to + n], scale)


def encode_feedback(
    codec: Codec, src: F32, scale: float, owed: Buffer, share: float, dst: Buffer, kept: Buffer
) -> bool:
    """With the mean m = src·scale, and `owed`, bfloat16, what averages lack of it so far: dst <- encode(m +
    owed/share), and m alone where that is 0; kept, bfloat16, <- owed + share·(m - what was sent). True when
    all was finite.
    """
    if isinstance(codec, NativeCodec):
        return compiled.encode_feedback(codec.wire_id, src, scale, owed, share, dst, kept)
    store, by = TwinCodec("bf16", twin.BF16), np.float32(share)
    before, sent = np.empty_like(src), np.empty_like(src)
    store.decode(owed, before)
    with np.errstate(all="ignore"):
        mean = src * np.float32(scale)
        wanted = before / by
        wanted[mean == 0] = 0
        wanted += mean
        finite = codec.encode(wanted, dst, 1.0)
        codec.decode(dst, sent)
        short = (mean - sent) * by + before
    store.encode(short, kept, 1.0)
    return finite
