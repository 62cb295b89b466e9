"""The sparse codecs without compiled code, equal to `csrc/cpu/sparse.cpp` to the bit.

`csrc/cpu/sparse.h` has the layout: a record for each block of 4096 elements, which keeps the largest 1/2^l of
them in two bits each. A codec's wire id is SPARSE + l.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from p2pavg.native import Buffer

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]

SPARSE = 16
LOW_BITS = range(4, 9)
BLOCK = 4096
_ROWS = 16  # blocks that are worked on at a time
_LEAST, _MOST = np.uint32(27 << 23), np.uint32(227 << 23)  # 2^-100 and 2^100
_SCALES = 4


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a block of m elements: `kept` indices, and where their parts lie, in bytes."""

    low: int
    m: int

    @property
    def kept(self) -> int:
        return -(-self.m // (1 << self.low))

    @property
    def upper_at(self) -> int:
        return _SCALES + -(-self.kept * self.low // 8)

    @property
    def codes_at(self) -> int:
        return self.upper_at + -(-2 * self.kept // 8)

    @property
    def size(self) -> int:
        return self.codes_at + -(-2 * self.kept // 8)


def encoded_size(codec: int, n: int) -> int:
    """Bytes of n encoded elements."""
    low, rest = codec - SPARSE, n % BLOCK
    return n // BLOCK * Record(low, BLOCK).size + (Record(low, rest).size if rest else 0)


def _groups(codec: int, n: int) -> Iterator[tuple[Record, int, int, int, int]]:
    """(record, first element, element behind, first byte, byte behind) of blocks of equal length."""
    low, whole = codec - SPARSE, n - n % BLOCK
    size = Record(low, BLOCK).size
    for at in range(0, whole, _ROWS * BLOCK):
        end = min(at + _ROWS * BLOCK, whole)
        yield Record(low, BLOCK), at, end, at // BLOCK * size, end // BLOCK * size
    if whole < n:
        first = whole // BLOCK * size
        yield Record(low, n - whole), whole, n, first, first + Record(low, n - whole).size


def encode(codec: int, src: F32, dst: Buffer, scale: float) -> bool:
    """dst <- encode(src * scale); True when all are finite."""
    data, finite = np.frombuffer(dst, np.uint8), True
    for record, at, end, first, last in _groups(codec, len(src)):
        with np.errstate(all="ignore"):
            rows = src[at:end].reshape(-1, record.m) * np.float32(scale)
        finite &= _encode_rows(record, rows, data[first:last].reshape(-1, record.size))
    return finite


def check(codec: int, src: Buffer, n: int) -> bool:
    """Whether these are the bytes of n finite elements."""
    data = np.frombuffer(src, np.uint8)
    if len(data) != encoded_size(codec, n):
        return False
    for record, _, _, first, last in _groups(codec, n):
        sound, empty, _, _ = _read(record, data[first:last].reshape(-1, record.size))
        if not (sound | empty).all():
            return False
    return True


def decode(codec: int, src: Buffer, dst: F32, scale: float = 1.0) -> None:
    """dst <- decode(src) * scale; what is malformed decodes to any values."""
    dst[:] = 0
    for at, values in _terms(codec, src, len(dst), scale):
        dst[at] = values


def decode_add(codec: int, src: Buffer, acc: F32, weight: float) -> bool:
    """acc += weight * decode(src); True when src is well-formed and every term is finite."""
    if not check(codec, np.frombuffer(src, np.uint8)[: encoded_size(codec, len(acc))], len(acc)):
        return False
    finite = True
    for at, values in _terms(codec, src, len(acc), weight):
        finite &= bool(np.isfinite(values).all())
        with np.errstate(all="ignore"):
            acc[at] += values
    return finite


def _terms(codec: int, src: Buffer, n: int, factor: float) -> Iterator[tuple[npt.NDArray[np.int64], F32]]:
    """(elements, their values times the factor), each element once."""
    data = np.frombuffer(src, np.uint8)
    if len(data) < encoded_size(codec, n):
        raise ValueError(f"{n} elements take {encoded_size(codec, n)} bytes, but the buffer has {len(data)}")
    for record, at, _, first, last in _groups(codec, n):
        sound, _, indices, values = _read(record, data[first:last].reshape(-1, record.size))
        starts = at + record.m * np.arange(len(sound))[:, None]
        with np.errstate(all="ignore"):
            yield (starts + indices)[sound].reshape(-1), (values * np.float32(factor))[sound].reshape(-1)


def _encode_rows(record: Record, rows: F32, out: U8) -> bool:
    out[:] = 0
    bits = rows.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest = bits.max(axis=1)
    broken = largest >= _MOST
    out[broken, :2] = np.frombuffer(np.uint16(0x7FC0).tobytes(), np.uint8)
    used = np.flatnonzero(~broken & (largest >= _LEAST))
    if len(used):
        out[used] = _records(record, rows[used], bits[used], largest[used])
    return not broken.any()


def _records(record: Record, rows: F32, bits: U32, largest: U32) -> U8:
    """uint8[rows, record.size]."""
    order = np.argsort(np.uint32(0xFFFFFFFF) - bits, axis=1, kind="stable")
    indices = np.sort(order[:, : record.kept], axis=1)
    chosen = np.take_along_axis(bits, indices, axis=1)
    exponent = (largest >> np.uint32(23))[:, None]
    shift = np.minimum(exponent - (chosen >> np.uint32(23)), np.uint32(31))
    q = ((chosen & np.uint32(0x7FFFFF) | np.uint32(0x800000)) >> shift).astype(np.int64)
    start = np.where(q.min(axis=1) > 0, q.sum(axis=1) // record.kept, 1)[:, None]
    is_big = q >= start
    big, small = (_scale(q, where, exponent[:, 0]) for where in (is_big, ~is_big))
    negative = np.take_along_axis(rows, indices, axis=1).view(np.uint32) >> np.uint32(31) != 0
    negative &= is_big | (small != 0)[:, None]
    low = (indices[:, :, None] >> np.arange(record.low)) & 1
    upper = np.zeros((len(rows), 2 * record.kept), np.uint8)
    np.put_along_axis(upper, (indices >> record.low) + np.arange(record.kept), 1, axis=1)
    codes = np.stack([negative, is_big], axis=2)
    return np.concatenate(
        [
            np.stack([big, small], axis=1).view(np.uint8),
            *(_packed(part.reshape(len(rows), -1)) for part in (low, upper, codes)),
        ],
        axis=1,
    )


def _scale(q: npt.NDArray[np.int64], where: Flags, exponent: U32) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits of the mean of those values, rounded down."""
    mean = (q * where).sum(axis=1) // np.maximum(where.sum(axis=1), 1)
    unit = (exponent - np.uint32(23) << np.uint32(23)).view(np.float32)
    found: npt.NDArray[np.uint16] = (
        (mean.astype(np.float32) * unit).view(np.uint32) >> np.uint32(16)
    ).astype(np.uint16)
    return found


def _packed(bits: npt.NDArray[np.generic]) -> U8:
    return np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")


def _read(record: Record, data: U8) -> tuple[Flags, Flags, npt.NDArray[np.int64], F32]:
    """(which records are well-formed and hold something, which are all zeros, indices, values): bool[rows]
    twice, int64 and float32[rows, kept].
    """
    kept, rows = record.kept, len(data)
    big, small = np.ascontiguousarray(data[:, :_SCALES]).view(np.uint16).astype(np.uint32).T
    empty: Flags = ~np.asarray(data.any(axis=1))
    bits = [
        np.unpackbits(data[:, start:end], axis=1, bitorder="little")
        for start, end in (
            (_SCALES, record.upper_at),
            (record.upper_at, record.codes_at),
            (record.codes_at, record.size),
        )
    ]
    low_bits, upper, codes = bits
    sound: Flags = (big > 0) & (big < _MOST >> np.uint32(16)) & (small <= big) & (upper.sum(axis=1) == kept)
    sound &= ~low_bits[:, kept * record.low :].any(axis=1) & ~codes[:, 2 * kept :].any(axis=1)
    low = low_bits[:, : kept * record.low].reshape(rows, kept, record.low) << np.arange(record.low)
    high = np.argsort(1 - upper, axis=1, kind="stable")[:, :kept] - np.arange(kept)
    indices = (high << record.low) + low.sum(axis=2)
    sound &= (np.diff(indices, axis=1) > 0).all(axis=1) & (indices[:, -1] < record.m)
    pairs = codes[:, : 2 * kept].reshape(rows, kept, 2)
    scales = np.where(pairs[:, :, 1] > 0, big[:, None], small[:, None]) << np.uint32(16)
    values = (scales.astype(np.uint32) | pairs[:, :, 0].astype(np.uint32) << np.uint32(31)).view(np.float32)
    return sound, empty, indices, values
