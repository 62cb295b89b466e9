"""Every implementation of the built-in codecs under one roof, and a float64 decoder to judge them by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from p2pavg import native
from p2pavg.codecs import WIRE_IDS, Codec, NativeCodec, TwinCodec

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]


def instruction_sets() -> list[str]:
    """The native implementations that run here, the portable one last; empty without the native module."""
    if not native.available():
        return []
    before = native.compiled.isa()
    found = [isa for isa in ("avx2", "neon", "portable") if native.compiled.select_isa(isa)]
    native.compiled.select_isa(before)
    return found


IMPLEMENTATIONS = [*instruction_sets(), "twin"]
NAMES = list(WIRE_IDS)
BLOCKS = {"fp16": 4096, "int8": 1024, "int4": 1024}
briefly = settings(max_examples=40, deadline=None)


@contextmanager
def implementation(which: str, name: str) -> Iterator[Codec]:
    """The codec `name` as implemented by `which`."""
    if which == "twin":
        yield TwinCodec(name, WIRE_IDS[name])
        return
    before = native.compiled.isa()
    assert native.compiled.select_isa(which)
    try:
        yield NativeCodec(name, WIRE_IDS[name])
    finally:
        native.compiled.select_isa(before)


def encoded(codec: Codec, x: F32, scale: float = 1.0) -> tuple[U8, bool]:
    """The bytes of x·scale and whether all were finite. Fails when a byte is not written, or one too many."""
    size = codec.encoded_size(len(x))
    results = []
    for poison in (0xA5, 0x5A):
        dst = np.full(size + 64, poison, np.uint8)
        finite = codec.encode(x, dst[:size], scale)
        assert (dst[size:] == poison).all(), "written beyond the end"
        results.append((dst[:size], finite))
    assert (results[0][0] == results[1][0]).all(), "a byte was not written"
    return results[0]


def decoded(codec: Codec, data: U8, n: int, scale: float = 1.0) -> F32:
    """What `data` decodes to."""
    dst = np.full(n, np.nan, np.float32)
    codec.decode(data, dst, scale)
    return dst


def reference_decode(name: str, data: U8, n: int) -> F64:
    """An independent decoder in float64, straight from the layout in the documentation."""
    if name == "none":
        return data.view(np.float32).astype(np.float64)
    if name == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    block = BLOCKS[name]
    blocks = -(-n // block)
    header = -(-blocks * {"fp16": 1, "int8": 4, "int4": 4}[name] // 64) * 64
    each = np.arange(n) // block
    if name == "fp16":
        exponents = data[:blocks].view(np.int8).astype(np.float64)
        return data[header:].view(np.float16).astype(np.float64) * np.exp2(-exponents)[each]
    steps = data[: 4 * blocks].view(np.float32).astype(np.float64)
    if name == "int8":
        return data[header:].view(np.int8) * steps[each]
    levels = [(byte >> shift & 15 ^ 8) - 8 for byte in data[header:].tolist() for shift in (0, 4)]
    return np.array(levels[:n], np.float64) * steps[each]


def tolerance(name: str, y: F64) -> F64:
    """The largest error that the documentation allows per element of y, which is finite."""
    if name == "none":
        return np.zeros_like(y)
    if name == "bf16":
        # The last finite bfloat16 stands for all that would round to infinity.
        return np.abs(y) * 2.0**-8 + 2.0**-133
    block = BLOCKS[name]
    largest = np.array([np.abs(y[i : i + block]).max() for i in range(0, len(y), block)])
    largest = np.repeat(largest, block)[: len(y)]
    if name == "fp16":
        return np.maximum(np.abs(y) * 2.0**-11, largest * 2.0**-39) + 2.0**-152
    top = {"int8": 127, "int4": 7}[name]
    rounding = 6 * top * 2.0**-24  # in float32: of the scale, its inverse and the product
    return largest / (2 * top) * (1 + rounding) + 2.0**-111


SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 1e-30, 1e30, 65504.0, 65520.0, 3 * 2.0**-25]
    + [2.0**e for e in (-149, -127, -126, -113, -112, -25, -24)]
    + [3.4028235e38, -3.4028235e38, 3.3895314e38, 3.3961775e38]
    + [1 + odd * 2.0**-bits for odd in (1, 3) for bits in (8, 11)],
    np.float32,
)


@st.composite
def runs(draw: st.DrawFn, *, finite: bool = True, most: int = 9000) -> F32:
    """Float32 of any length, magnitude, alignment to 4 bytes and mixture of special values."""
    length = st.sampled_from([0, 1, 7, 8, 31, 33, 1023, 1024, 1025, 4095, 4096, 4097, 8193])
    n = draw(st.one_of(st.integers(0, 70), length.filter(lambda n: n <= most), st.integers(0, most)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = draw(st.integers(-148, 120))
    high = draw(st.integers(low, 127))
    x = rng.standard_normal(n) * np.exp2(rng.uniform(low, high, n))
    x = np.clip(x, -3.4028235e38, 3.4028235e38).astype(np.float32)
    share = draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]))
    x = np.where(rng.random(n) < share, rng.choice(SPECIAL, n), x)
    if not finite and n:
        for value in draw(
            st.lists(st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]), min_size=1, max_size=3)
        ):
            x[rng.integers(n)] = value
    shift = draw(st.integers(0, 15))
    room = np.zeros(n + 16, np.float32)
    room[shift : shift + n] = x
    return room[shift : shift + n]


scales = st.sampled_from([1.0, 1 / 3, -2.5, 1e-3, 4096.0, 2.0**-60])
