"""What a job awaits of whom, and owes to whom."""

from __future__ import annotations

import numpy as np
import pytest

from p2pavg import codecs
from p2pavg.allreduce.encoded import Layout
from p2pavg.allreduce.jobs import JobInProgress
from p2pavg.plan import Plan
from p2pavg.plan.part import Part


def job(rank: int, weights: tuple[float, ...], *, swaps: bool) -> JobInProgress:
    """Ranks 0 and 1, and 2 and 3, are regions; 0 owns the only part, of three chunks, and 2 is its deputy."""
    plan = Plan((Part(0, 0, 30, (2,), swaps),), (1, 1, 2, 2))
    layout = Layout(plan.parts, 10, codecs.get("fp16"))
    made = JobInProgress(
        7, rank, tuple(range(4)), tuple(bytes([r]) * 20 for r in range(4)), (True,) * 4, plan, layout,
        np.empty(layout.nbytes, np.uint8), False, weights=weights,
    )  # fmt: skip
    made.count()
    return made


@pytest.mark.parametrize(
    ("rank", "swaps", "expected", "owed"),
    [
        (0, False, [(3, 0), (3, 0), (3, 0), (0, 0)], [0, 0, 0, 0]),
        (0, True, [(3, 0), (3, 0), (3, 0), (0, 0)], [0, 0, 0, 0]),
        (1, True, [(0, 3), (0, 0), (0, 0), (0, 0)], [3, 0, 0, 0]),
        (2, False, [(0, 3), (0, 0), (0, 0), (3, 0)], [0, 0, 0, 0]),
        (2, True, [(3, 0), (0, 0), (0, 0), (3, 0)], [0, 0, 0, 0]),
        (3, True, [(0, 0), (0, 0), (0, 3), (0, 0)], [0, 0, 3, 0]),
    ],
)
def test_what_is_due(rank: int, swaps: bool, expected: list[tuple[int, int]], owed: list[int]) -> None:
    """Of two that swap each awaits the other's mean, and no result; without a swap the deputy awaits one.
    Partial means are not owed: they wait for others, so their link is not full while some are to go.
    """
    made = job(rank, (1.0, 1.0, 1.0, 1.0), swaps=swaps)
    assert [made.expected(other) for other in range(4)] == expected
    assert [made.owed(other) for other in range(4)] == owed


def test_a_side_without_weight_owes_nothing() -> None:
    """Nobody awaits a mean of a region that has no weight, or a contribution of a member without one."""
    silent = (1.0, 1.0, 0.0, 0.0)
    assert job(0, silent, swaps=True).expected(2) == (0, 0)
    assert job(2, silent, swaps=True).expected(3) == (0, 0)
    assert job(3, silent, swaps=True).owed(2) == 0
