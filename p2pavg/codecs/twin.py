"""The built-in codecs without compiled code, equal to `csrc/cpu` to the bit.

NumPy does all but float16, whose conversion takes torch (NumPy's is a hundred times slower). Runs are worked
through in pieces that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from p2pavg.native import Buffer

F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
U16: TypeAlias = npt.NDArray[np.uint16]
U32: TypeAlias = npt.NDArray[np.uint32]
DrawKey: TypeAlias = tuple[int, int, int]
"""(seed, epoch, index of the first element) of stochastic rounding."""

NONE, FP16, BF16, INT8, INT4 = range(5)
BLOCK = 4096
STEP_BLOCK = 1024
PIECE = 16 * BLOCK
INF_BITS = 0x7F800000
INT8_TOP_STEP = np.float32(float.fromhex("0x1.020406p+121"))  # 127 of it are still finite
LEVELS = {INT8: 127, INT4: 7}
_ELEMENT_SIZE = {NONE: 4, FP16: 2, BF16: 2, INT8: 1}


def _header_size(codec: int, n: int) -> int:
    used = {FP16: -(-n // BLOCK), INT8: 4 * -(-n // STEP_BLOCK), INT4: 4 * -(-n // STEP_BLOCK)}.get(codec, 0)
    return -(-used // 64) * 64


def encoded_size(codec: int, n: int) -> int:
    """Bytes of n encoded elements."""
    return _header_size(codec, n) + _body_size(codec, n)


def _body_size(codec: int, n: int) -> int:
    return -(-n // 2) if codec == INT4 else _ELEMENT_SIZE[codec] * n


def encode(codec: int, src: F32, dst: Buffer, scale: float, draws: DrawKey | None = None) -> bool:
    """dst <- encode(src·scale); True when all are finite. With `draws`, int8 rounds stochastically."""
    header, body = _split(codec, dst, len(src))
    header[:] = 0
    finite = True
    for start, stop, block in _pieces(codec, len(src)):
        rows = src[start:stop].reshape(-1, block)
        with np.errstate(all="ignore"):
            if codec in LEVELS:
                uniform = None if draws is None else _uniform(draws, start, rows.size).reshape(rows.shape)
                steps = header.view(np.float32)[start // STEP_BLOCK :][: len(rows)]
                levels, fits = _levels(codec, rows, np.float32(scale), uniform, steps)
                _put_levels(codec, levels.reshape(-1), body, start, stop)
                finite &= fits
            else:
                out = body[start:stop].reshape(-1, block)
                exponents = header.view(np.int8)[start // BLOCK :][: len(rows)]
                finite &= _encode_rows(codec, rows * np.float32(scale), exponents, out)
    return finite


def decode(codec: int, src: Buffer, dst: F32, scale: float = 1.0) -> None:
    """dst <- decode(src)·scale."""
    header, body = _split(codec, src, len(dst))
    for start, stop, block in _pieces(codec, len(dst)):
        dst[start:stop] = _decode_rows(codec, header, body, start, stop, block, scale).reshape(-1)


def decode_add(codec: int, src: Buffer, acc: F32, weight: float) -> bool:
    """acc += weight·decode(src); True when every term is finite."""
    header, body = _split(codec, src, len(acc))
    finite = True
    for start, stop, block in _pieces(codec, len(acc)):
        term = _decode_rows(codec, header, body, start, stop, block, weight).reshape(-1)
        finite &= bool(np.isfinite(term).all())
        with np.errstate(all="ignore"):
            acc[start:stop] += term
    return finite


def _split(codec: int, buffer: Buffer, n: int) -> tuple[U8, npt.NDArray[Any]]:
    data = np.frombuffer(buffer, np.uint8)
    size = encoded_size(codec, n)
    if len(data) < size:
        raise ValueError(f"{n} elements take {size} encoded bytes, but the buffer has {len(data)}")
    at = _header_size(codec, n)
    kind = {NONE: np.float32, FP16: np.uint16, BF16: np.uint16, INT8: np.int8, INT4: np.uint8}[codec]
    return data[:at], data[at:size].view(kind)


def _pieces(codec: int, n: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, elements per row): pieces of whole blocks, then what is left as one row."""
    block = STEP_BLOCK if codec in LEVELS else BLOCK
    whole = n - n % block
    for start in range(0, whole, PIECE):
        yield start, min(start + PIECE, whole), block
    if whole < n:
        yield whole, n, n - whole


def _magnitude(y: F32) -> U32:
    return y.view(np.uint32) & np.uint32(0x7FFFFFFF)


def _encode_rows(codec: int, y: F32, exponents: npt.NDArray[np.int8], out: npt.NDArray[Any]) -> bool:
    bits = _magnitude(y)
    finite = bool((bits < INF_BITS).all())
    if codec == NONE:
        out[:] = y
        out[bits > INF_BITS] = np.nan
    elif codec == BF16:
        out[:] = _bf16(y, bits)
    else:
        exponents[:] = _exponents(bits)
        y = y * _powers(exponents)[:, None]
        top = np.where(exponents == -113, np.float32(32752), np.float32(np.inf))[:, None]
        out[:] = _half(np.where(np.isinf(y), y, y.clip(-top, top)))
    return finite


def _bf16(y: F32, bits: U32) -> U16:
    clamped = np.minimum(bits, np.uint32(0x7F7F7FFF))
    rounded = (clamped + np.uint32(0x7FFF) + ((clamped >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded |= (y.view(np.uint32) >> np.uint32(16)) & np.uint32(0x8000)
    rounded[bits == INF_BITS] = y.view(np.uint32)[bits == INF_BITS] >> np.uint32(16)
    rounded[bits > INF_BITS] = 0x7FC0
    return rounded.astype(np.uint16)


def _exponents(bits: U32) -> npt.NDArray[np.int8]:
    """One exponent per row, from its largest finite magnitude; see `half_exponent` in csrc/cpu/scalar.h."""
    largest = np.where(bits < INF_BITS, bits, np.uint32(0)).max(axis=1)
    biased = (largest >> np.uint32(23)).astype(np.int32)
    exponents = np.where(biased < 14, 127, 141 - biased)
    exponents[largest == 0] = 0
    return exponents.astype(np.int8)


def _powers(exponents: npt.NDArray[np.signedinteger[Any]]) -> F32:
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)


def load_torch() -> None:
    """Import torch, which takes seconds and which only float16 needs."""
    import torch  # noqa: F401


def _half(y: F32) -> U16:
    import torch

    halves: U16 = torch.from_numpy(y).to(torch.float16).view(torch.uint16).numpy()
    halves[np.isnan(y)] = 0x7E00
    return halves


def _float_of_half(halves: U16) -> F32:
    import torch

    y: F32 = torch.from_numpy(halves.copy()).view(torch.float16).to(torch.float32).numpy()
    return y


def _levels(
    codec: int, x: F32, scale: np.float32, uniform: F32 | None, steps: F32
) -> tuple[npt.NDArray[np.int8], bool]:
    """The levels of a row are x·(127 / largest |x|), in int4 7; the scale goes, with its sign, into the step
    alone. Also whether all are finite.
    """
    top = np.float32(LEVELS[codec])
    raw = _magnitude(x).max(axis=1)
    largest = raw.view(np.float32) * scale
    scaled = _magnitude(largest)
    finite = np.maximum(raw, scaled) < INF_BITS
    usable = finite & (np.minimum(raw, scaled) >= np.uint32(15 << 23))
    step = largest / top
    if codec == INT8:
        step = step.clip(-INT8_TOP_STEP, INT8_TOP_STEP)
    steps[:] = np.where(usable, step, np.where(finite, np.float32(0), np.float32(np.nan)))
    wanted = x * np.where(usable, top / raw.view(np.float32), np.float32(0))[:, None]
    levels = np.rint(wanted) if uniform is None else np.floor(wanted + uniform).clip(-127, 127)
    levels[~usable] = 0
    return levels.astype(np.int8), bool(finite.all())


def _put_levels(
    codec: int, levels: npt.NDArray[np.int8], body: npt.NDArray[Any], start: int, stop: int
) -> None:
    if codec == INT8:
        body[start:stop] = levels
        return
    halves = np.zeros(len(levels) + len(levels) % 2, np.uint8)
    halves[: len(levels)] = levels.view(np.uint8) & 0xF
    body[start // 2 : -(-stop // 2)] = halves[::2] | halves[1::2] << 4


def _get_levels(codec: int, body: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[np.int8]:
    if codec == INT8:
        stored: npt.NDArray[np.int8] = body[start:stop]
        return stored
    pairs = body[start // 2 : -(-stop // 2)]
    halves = np.empty(2 * len(pairs), np.uint8)
    halves[::2], halves[1::2] = pairs & 0xF, pairs >> 4
    levels: npt.NDArray[np.int8] = (halves[: stop - start] ^ np.uint8(8)).view(np.int8) - np.int8(8)
    return levels


def _decode_rows(
    codec: int, header: U8, body: npt.NDArray[Any], start: int, stop: int, block: int, scale: float
) -> F32:
    factor = np.float32(scale)
    with np.errstate(all="ignore"):
        if codec in LEVELS:
            first = start // STEP_BLOCK
            levels = _get_levels(codec, body, start, stop).reshape(-1, block).astype(np.float32)
            found: F32 = levels * (header.view(np.float32)[first : first + len(levels)] * factor)[:, None]
            return found
        rows = body[start:stop].reshape(-1, block)
        if codec == NONE:
            y = rows * factor
        elif codec == BF16:
            y = (rows.astype(np.uint32) << np.uint32(16)).view(np.float32) * factor
        else:
            first = start // BLOCK
            powers = _powers(-header[first : first + len(rows)].view(np.int8).astype(np.int32))
            y = (_float_of_half(rows) * powers[:, None]) * factor
    result: F32 = y
    return result


_MASK64 = (1 << 64) - 1


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _uniform(draws: DrawKey, start: int, n: int) -> F32:
    """The draws of elements start … start + n - 1: uniform in [0, 1), 24 bits each."""
    seed, epoch, first = draws
    golden = 0x9E3779B97F4A7C15
    key = _mix64((_mix64((seed + golden) & _MASK64) + epoch * golden) & _MASK64)
    values = np.empty(n, np.float32)
    done = 0
    while done < n:  # the keys change with the high half of the index
        index = (first + start + done) & _MASK64
        low = index & 0xFFFFFFFF
        count = min(n - done, (1 << 32) - low)
        part = _mix64(key ^ (((index >> 32) * 0xD1342543DE82EF95) & _MASK64))
        lanes = np.arange(low, low + count, dtype=np.uint64).astype(np.uint32)
        x = lanes * np.uint32(0x9E3779B1) + np.uint32(part & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x7FEB352D)
        x ^= (x >> np.uint32(15)) ^ np.uint32(part >> 32)
        x *= np.uint32(0x846CA68B)
        x = (x >> np.uint32(8)) ^ (x >> np.uint32(24))
        values[done : done + count] = x.astype(np.float32) * np.float32(2**-24)
        done += count
    return values
