"""The fractions that make the worst of several sums smallest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from p2pavg import native
from p2pavg.allreduce.minimax import Costs, Simplex, minimax

F64 = npt.NDArray[np.float64]


def table(rng: np.random.Generator, columns: int) -> F64:
    """Costs, half of them nothing."""
    found = rng.random((int(rng.integers(4, 40)) * columns, columns)) * (rng.random(columns) < 0.5)
    found[rng.integers(0, len(found), columns), np.arange(columns)] = 1.0
    return found


def whole(dense: F64) -> F64:
    """The best fractions, of all rows at once."""
    program, y = Simplex(dense.shape[1]), np.zeros(dense.shape[1])
    program.add(dense / dense.max())
    program.solve(y, 100_000)
    return y / y.sum()


def costs(dense: F64, full: int) -> Costs:
    """The table, of which all but the first `full` rows are told by their entries."""
    sparse = dense[full:]
    places = np.repeat(np.arange(len(sparse))[None], dense.shape[1], axis=0)
    return Costs(dense[:full], places, sparse.T.copy(), len(sparse))


@pytest.mark.parametrize("seed", range(40))
def test_of_many_rows_the_best_is_found_as_of_all_at_once(seed: int) -> None:
    """Fractions add up to 1, and no others have a smaller worst sum: not those of the whole program, nor any
    of a thousand drawn ones.
    """
    rng = np.random.default_rng(seed)
    columns = int(rng.integers(2, 30))
    dense = table(rng, columns)
    found = minimax(costs(dense, int(rng.integers(1, 5))))
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    worst = (dense @ found).max()
    drawn = rng.dirichlet(np.ones(columns), 1000)
    assert worst <= (drawn @ dense.T).max(axis=1).min() * (1 + 1e-6)
    assert worst == pytest.approx((dense @ whole(dense)).max(), rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_a_table_is_the_same_by_its_entries(seed: int) -> None:
    """Sums, rows, the least of each row and where each column costs most are those of the whole table."""
    rng = np.random.default_rng(seed)
    dense, full = table(rng, 12), int(rng.integers(1, 9))
    told, x = costs(dense, full), rng.random(12)
    assert told.sums(x) == pytest.approx(dense @ x)
    wanted = np.unique(rng.integers(0, len(dense), 15))
    assert np.array_equal(told.rows(wanted), dense[wanted])
    assert np.array_equal(np.concatenate(told.least), dense.min(axis=1))
    assert np.array_equal(dense[told.worst, np.arange(12)], dense.max(axis=0))


@pytest.mark.skipif(not native.available(), reason="needs the native module")
@pytest.mark.parametrize("seed", range(20))
def test_both_simplexes_find_the_best(seed: int) -> None:
    """The compiled one and its twin find solutions as good as each other, be all rows there at once or some
    added to a solution of the others; stopped early, both are where no row is broken.
    """
    rng = np.random.default_rng(seed)
    dense = table(rng, int(rng.integers(2, 40))).clip(0)
    columns, some = dense.shape[1], int(rng.integers(1, len(dense)))
    best = whole(dense)
    for kind in (Simplex, native.compiled.Simplex):
        for at in (len(dense), some):
            program, y = kind(columns), np.full(columns, np.nan)
            program.add(np.maximum(dense[:at], 1e-7))
            program.solve(y, 3)
            assert (dense[:at] @ y).max() <= 1 + 1e-9
            program.solve(y, 10_000)
            program.add(dense[at:])
            program.solve(y, 10_000)
            assert (dense @ y).max() == pytest.approx(1, rel=1e-5)
            assert (dense @ y / y.sum()).max() == pytest.approx((dense @ best).max(), rel=1e-5)


@pytest.mark.skipif(not native.available(), reason="needs the native module")
def test_what_the_compiled_simplex_cannot_take_is_refused() -> None:
    """Rows or a solution of another size, or of another type: an error, nothing written."""
    program = native.compiled.Simplex(3)
    with pytest.raises(ValueError, match="as many elements"):
        program.add(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="as many elements"):
        program.solve(np.zeros(2), 10)
    with pytest.raises(TypeError):
        program.add(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize("kind", [Simplex, native.compiled.Simplex] if native.available() else [Simplex])
def test_without_rows_nothing_is_found(kind: type[Simplex]) -> None:
    """Nothing holds the sum back, so there is no best: zeros."""
    y = np.ones(3)
    kind(3).solve(y, 10)
    assert not y.any()
