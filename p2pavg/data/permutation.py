"""Position -> index: one pseudo-random permutation of blocks per pass, computed without a table.

A permutation of n values is a Feistel network over the next even number of bits, applied again until the
value is below n ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The same
on every machine, whatever its versions of Python and NumPy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

ROUNDS = 6
_TURN = 0x9E3779B9  # makes the function of each round another one
_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): a bijection on 64 bits that spreads
    every bit.
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def keyed(*parts: int) -> int:
    """A key of 64 bits from whole numbers."""
    key = 0
    for part in parts:
        key = _mixed(key ^ (part & _MASK))
    return key


def permuted(value: int, count: int, key: int) -> int:
    """Where the permutation of `key` over range(count) puts `value`."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = value >> half, value & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed((key + turn * _TURN) ^ (right << 8)) & low)
        value = (left << half) | right
        if value < count:
            return value


def unpermuted(value: int, count: int, key: int) -> int:
    """The inverse of `permuted`."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = value >> half, value & low
        for turn in reversed(range(ROUNDS)):
            left, right = right ^ (_mixed((key + turn * _TURN) ^ (left << 8)) & low), left
        value = (left << half) | right
        if value < count:
            return value


@lru_cache(maxsize=256)
def _block_at(place: int, blocks: int, key: int) -> int:
    return permuted(place, blocks, key)


@lru_cache(maxsize=256)
def _place_of(block: int, blocks: int, key: int) -> int:
    return unpermuted(block, blocks, key)


@dataclass(frozen=True, slots=True)
class EvenBlocks:
    """`length` indices in blocks of `block`, the last perhaps shorter: blocks and what is in them are
    permuted.
    """

    length: int
    block: int
    seed: int

    def index(self, position: int) -> int:
        """The index that a position of the endless sequence of passes stands for."""
        number, at = divmod(position, self.length)
        blocks = -(-self.length // self.block)
        short = blocks * self.block - self.length  # what the last block lacks
        place, inside = divmod(at, self.block)
        if short:
            last = _place_of(blocks - 1, blocks, keyed(self.seed, number))
            if at >= last * self.block:  # at the short block, or behind it
                if at < (last + 1) * self.block - short:
                    place, inside = last, at - last * self.block
                else:
                    place, inside = divmod(at + short, self.block)
        block = _block_at(place, blocks, keyed(self.seed, number))
        long = self.block - short if block == blocks - 1 else self.block
        return block * self.block + permuted(inside, long, keyed(self.seed, number, block, 1))


class Shards:
    """Blocks of uneven lengths, each read from its beginning: shards are permuted, their samples are not."""

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self.lengths = tuple(lengths)
        self.length = sum(lengths)
        self.seed = seed
        self._pass: tuple[int, list[int], list[int]] | None = None  # of the last question: its order and ends

    def _ordered(self, number: int) -> tuple[list[int], list[int]]:
        if self._pass is None or self._pass[0] != number:
            key, count = keyed(self.seed, number), len(self.lengths)
            order = [permuted(place, count, key) for place in range(count)]
            self._pass = number, order, list(accumulate(self.lengths[shard] for shard in order))
        return self._pass[1], self._pass[2]

    def piece(self, position: int, most: int) -> tuple[int, int, int]:
        """(shard, first, end): the samples of a shard that begin at a position, at most `most`."""
        number, at = divmod(position, self.length)
        order, ends = self._ordered(number)
        place = bisect_right(ends, at)
        shard = order[place]
        first = at - (ends[place] - self.lengths[shard])
        return shard, first, min(self.lengths[shard], first + most)
