"""What a loader gets from a sampler."""

from __future__ import annotations

from itertools import islice

from torch.utils.data import DataLoader

from p2pavg import SwarmSampler

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
