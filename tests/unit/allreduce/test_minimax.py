"""The fractions that make the worst of several sums smallest."""

from __future__ import annotations

import numpy as np
import pytest

from p2pavg.allreduce import minimax as program
from p2pavg.allreduce.minimax import minimax


@pytest.mark.parametrize("seed", range(40))
def test_of_many_rows_the_best_is_found_as_of_all_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fractions add up to 1, and no others have a smaller worst sum: not those of the whole program, nor any
    of a thousand drawn ones.
    """
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(2, 30))
    costs = rng.random((int(rng.integers(4, 40)) * columns, columns)) * (rng.random(columns) < 0.5)
    costs[rng.integers(0, len(costs), columns), np.arange(columns)] = 1.0
    found = minimax(costs)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    worst = (costs @ found).max()
    drawn = rng.dirichlet(np.ones(columns), 1000)
    assert worst <= (drawn @ costs.T).max(axis=1).min() * (1 + 1e-6)
    assert worst == pytest.approx((costs @ program._simplex(costs)).max(), rel=1e-6)
