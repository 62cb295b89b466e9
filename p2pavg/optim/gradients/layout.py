"""The places of the parameters' gradients in the vector that peers average. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 32
"""Elements between slice boundaries: at least 64 bytes for every gradient dtype."""

GUARD = 4096
"""Zeros between gradients, marks and extra: a codec scales at most this many elements by one factor."""


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """offsets[i], sizes[i]: elements of parameter i's slice; `marks`: where one mark per parameter begins;
    `extra`, `extra_size`: where the deltas of buffers lie.

    Slices lie in reverse parameter order, because gradients become ready back to front. The vector has
    `numel` float32 elements; everything outside slices and marks is 0.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    marks: int
    extra: int
    extra_size: int
    numel: int


def aligned(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def pack(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], int]:
    """Offsets by position in `order`, one aligned slice after the other, and where the last one ends."""
    offsets, end = [], 0
    for index in order:
        offsets.append(end)
        end += aligned(sizes[index])
    return offsets, end


def exchange_layout(sizes: Sequence[int], extra_size: int = 0) -> VectorLayout:
    """The layout that every peer with these parameters uses, whatever its devices."""
    order = list(reversed(range(len(sizes))))
    packed, end = pack(sizes, order)
    marks = end + GUARD
    end = marks + aligned(len(sizes))
    extra = end + GUARD if extra_size else end
    return VectorLayout(
        tuple(reversed(packed)), tuple(sizes), marks, extra, extra_size, extra + aligned(extra_size)
    )
