"""Which index of which pass went into which average, counted anew from what scripts drew and reports name.

Where a position of a pass stands in the data is computed here once more, from the description in
`p2pavg/data/permutation.py`: a Feistel network of six rounds over the finalizer of splitmix64, walked until
the value is in range.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from bench.world.model import SAMPLES
from bench.world_check.logs import Run

MASK = (1 << 64) - 1
ROUNDS = 6
TURN = 0x9E3779B9
SETTLES = 6  # averages after which what a dead peer held was drawn by others


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _key(*parts: int) -> int:
    return functools.reduce(lambda key, part: _mix(key ^ (part & MASK)), parts, 0)


def _permute(value: int, count: int, key: int) -> int:
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << bits) - 1
    while True:
        left, right = divmod(value, 1 << bits)
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mix((key + turn * TURN) ^ (right << 8)) & low)
        value = left * (1 << bits) + right
        if value < count:
            return value


def index_of(number: int, at: int, seed: int, block: int) -> int:
    """The sample at a position of a pass, of data that whole blocks fill."""
    assert SAMPLES % block == 0
    place, inside = divmod(at, block)
    chosen = _permute(place, SAMPLES // block, _key(seed, number))
    return chosen * block + _permute(inside, block, _key(seed, number, chosen, 1))


def consumed(run: Run) -> dict[int, list[tuple[int, int]]]:
    """Epoch -> (pass, position) pairs in the average of the surviving lineage."""
    return {
        epoch: [(number, at) for number, first, end in report["consumed"] for at in range(first, end)]
        for epoch, report in run.chain.items()
    }


def count_indices(run: Run) -> dict[str, Any]:
    """indices_doubled: in two averages. indices_lost: in none, though the averages since went past them; not
    those that the first averages jumped over, where peers that begin at once draw far apart.
    indices_untrained: in averages more often than scripts trained on them. averages_misnamed: with other
    numbers of samples than indices.
    """
    by_epoch = consumed(run)
    held: Counter[tuple[int, int]] = Counter(pair for pairs in by_epoch.values() for pair in pairs)
    seed, block = run.facts["seed"], run.facts["block"]
    averaged = Counter(index_of(number, at, seed, block) for number, at in held.elements())
    trained: Counter[int] = Counter(
        index for life in run.lives for step in life.of("took") for index in step["indices"]
    )
    last = max(by_epoch, default=0)
    settled = max((epoch for epoch in by_epoch if epoch <= last - SETTLES), default=None)
    pairs = by_epoch[settled] if settled is not None else []
    frontier = max((number * SAMPLES + at for number, at in pairs), default=-1) + 1
    places = {number * SAMPLES + at for number, at in held}
    misnamed = [
        epoch
        for epoch, report in run.chain.items()
        if len(by_epoch[epoch]) != report["samples"]
        or sum(member["samples"] for member in report["members"] if member["weight"] > 0) != report["samples"]
    ]
    discarded: Counter[str] = Counter()
    for life in run.lives:
        for report in life.reports:
            for why, count in zip(report["discarded_why"], report["discarded_samples"], strict=False):
                discarded[why] += count
    # An average of which nobody lived to tell took its samples along: their positions show as a gap.
    untold = sorted(set(range(last + 1)) - set(run.chain))
    return {
        "indices_averaged": len(held),
        "passes": round(len(held) / SAMPLES, 3),
        "indices_doubled": sum(count > 1 for count in held.values()),
        "indices_lost": 0 if untold else len(set(range(frontier)) - places),
        "indices_settled": frontier,
        "indices_untrained": sum((averaged - trained).values()),
        "samples_trained": sum(trained.values()),
        "averages_misnamed": len(misnamed),
        "averages_untold": untold,
        "discarded_and_named": dict(discarded),
    }
