"""What a loader gets from a sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from p2pavg import SwarmSampler, SwarmShards
from p2pavg.data.permutation import EvenBlocks
from p2pavg.errors import ConfigurationError

LENGTH, BATCH = 50, 4


def _attached(endless: bool) -> SwarmSampler:
    sampler = SwarmSampler(LENGTH, seed=3, block=8, endless=endless)
    sampler.draws.attach(b"p" * 32, tuple, lambda: None)
    return sampler


def test_an_endless_sampler_fills_batches_over_the_end_of_a_pass() -> None:
    """Batches of one size hold each index once a pass, though the size does not divide the pass."""
    sampler = _attached(endless=True)
    loader = DataLoader(range(LENGTH), sampler=sampler, batch_size=BATCH, drop_last=True)
    batches = [batch.tolist() for batch in islice(loader, LENGTH)]
    assert {len(batch) for batch in batches} == {BATCH}
    drawn = [index for batch in batches for index in batch]
    for begin in range(0, len(drawn), LENGTH):
        assert sorted(drawn[begin : begin + LENGTH]) == list(range(LENGTH))


def test_a_sampler_ends_with_the_pass() -> None:
    """Iterating gives each index once, then stops, and goes on with the next pass when iterated again."""
    sampler = _attached(endless=False)
    for _ in range(2):
        drawn = list(sampler)
        assert sorted(drawn) == list(range(LENGTH))
        sampler.draws.trained(len(drawn))


def test_a_loader_that_drops_what_is_left_of_a_pass_is_refused() -> None:
    """drop_last=True without `endless`: the short batch would be drawn for ever; an error says so instead."""
    sampler = _attached(endless=False)
    loader = DataLoader(range(LENGTH), sampler=sampler, batch_size=BATCH, drop_last=True)
    for batch in loader:
        sampler.draws.trained(len(batch))
    left = LENGTH % BATCH
    with pytest.raises(ConfigurationError, match=f"none of the last {left} samples"):
        assert not any(list(loader) for _ in range(10))


def test_a_look_at_a_batch_costs_nothing() -> None:
    """A loader whose workers fetch all of a small pass, and that is dropped after a batch, twice."""
    sampler = _attached(endless=False)
    for _ in range(2):
        next(iter(DataLoader(range(LENGTH), sampler=sampler, batch_size=25)))
    assert sorted(sampler) == list(range(LENGTH))


class Drawn(IterableDataset[int]):
    def __init__(self, sampler: SwarmSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


def test_a_worker_that_iterates_the_sampler_is_refused() -> None:
    """Each worker of a DataLoader would draw the same positions from its copy."""
    drawn = Drawn(_attached(endless=True))
    assert next(iter(DataLoader(drawn, batch_size=BATCH))).tolist()
    with pytest.raises(ConfigurationError, match="worker iterates the sampler"):
        next(iter(DataLoader(drawn, batch_size=BATCH, num_workers=1, multiprocessing_context="fork")))


@pytest.mark.parametrize("kind", ["indices", "shards"])
def test_two_iterations_in_turns_are_refused(kind: str) -> None:
    """Steps would count positions of the other iteration; one that was left half way is no obstacle."""
    sampler: Any = _attached(endless=False)
    if kind == "shards":
        sampler = SwarmShards(["a", "b"], [30, 20], piece=4)
        sampler.draws.attach(b"p" * 32, tuple, lambda: None)
    left, now = iter(sampler), iter(sampler)
    next(left)
    next(now)
    with pytest.raises(ConfigurationError, match="in turns"):
        list(left)
    assert next(now) is not None


@pytest.mark.parametrize("batch", [3, 7, 50, 64])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_of_an_iteration_comes_again(batch: int, workers: int) -> None:
    """A loop that breaks off while workers have fetched ahead, again and again: each index is trained once a
    pass, whatever its batches.
    """
    sampler = _attached(endless=False)
    loader = DataLoader(
        range(LENGTH),
        sampler=sampler,
        batch_size=batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    trained: list[int] = []
    while len(trained) < 2 * LENGTH:
        for some in islice(loader, 2):
            sampler.draws.trained(len(some))
            trained += some.tolist()
    assert Counter(trained[: 2 * LENGTH]) == dict.fromkeys(range(LENGTH), 2)
    blocks = EvenBlocks(LENGTH, 8, seed=3)
    named = [blocks.index(position) for run in sampler.draws._trained for position in range(*run)]
    assert named == trained
