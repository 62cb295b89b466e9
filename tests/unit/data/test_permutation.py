"""Positions and indices: every pass is a permutation, the same wherever it is computed."""

from __future__ import annotations

import pytest

from p2pavg.data.permutation import EvenBlocks, Shards, permuted, unpermuted

FIRST = [766, 737, 707, 776, 758, 764]
SEVEN = [2, 0, 1, 6, 3, 4, 5]


@pytest.mark.parametrize(
    ("length", "block"), [(1, 1), (10, 3), (1000, 256), (777, 1), (256, 256), (4096, 64)]
)
def test_each_pass_has_every_index_once(length: int, block: int) -> None:
    """A pass holds each index once, and two passes have other orders."""
    blocks = EvenBlocks(length, block, seed=5)
    passes = [[blocks.index(number * length + at) for at in range(length)] for number in range(3)]
    assert all(sorted(each) == list(range(length)) for each in passes)
    if length > 20:
        assert passes[0] != passes[1] != passes[2]


def test_what_is_neighbouring_is_read_together() -> None:
    """The positions of one block are indices of one block."""
    blocks = EvenBlocks(1000, 100, seed=1)
    for place in range(10):
        assert len({blocks.index(100 * place + at) // 100 for at in range(100)}) == 1


def test_the_order_is_the_same_in_every_version() -> None:
    """The first indices of a pass are fixed: peers of other versions must draw the same."""
    assert [EvenBlocks(1000, 100, seed=1).index(at) for at in range(6)] == FIRST
    assert [permuted(value, 7, 3) for value in range(7)] == SEVEN


def test_the_inverse_undoes_the_permutation() -> None:
    """unpermuted() is the inverse, for sizes at and beside powers of four."""
    for count in (1, 2, 3, 15, 16, 17, 255, 257):
        assert [unpermuted(permuted(value, count, 9), count, 9) for value in range(count)] == list(
            range(count)
        )


def test_shards_are_read_in_pieces_that_cover_them() -> None:
    """The pieces of a pass cover each shard once, in its order; no piece is of two shards."""
    shards, seen = Shards([5, 1, 12, 3], seed=2), {}
    at = 21
    while at < 42:
        shard, first, end = shards.piece(at, 4)
        assert seen.setdefault(shard, 0) == first
        seen[shard] = end
        at += end - first
    assert seen == {0: 5, 1: 1, 2: 12, 3: 3}
