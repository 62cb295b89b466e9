"""At which stage of a transfer `bench chaos` strikes."""

from __future__ import annotations

import pytest

from p2pavg.bench.chaos.kinds import STAGES
from p2pavg.bench.chaos.worker import stages
from p2pavg.transport.engine import JobProgress


def moved(contributions: tuple[int, ...], results: tuple[int, ...]) -> JobProgress:
    nothing = (0,) * len(results)
    return JobProgress(contributions, results, nothing, nothing, 0.0, 0.0)


@pytest.mark.parametrize(
    ("contributions", "results", "expected"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), set()),
        ((0, 3, 0, 0), (0, 0, 0, 0), {"contributions"}),
        ((0, 0, 1, 0), (0, 0, 0, 0), {"means"}),
        ((0, 3, 0, 1), (0, 0, 0, 0), {"contributions", "means"}),
        ((0, 3, 0, 1), (0, 0, 2, 0), {"contributions", "means", "results"}),
    ],
)
def test_a_stage_shows_in_what_came(
    contributions: tuple[int, ...], results: tuple[int, ...], expected: set[str]
) -> None:
    """Rank 0 and rank 1 are in one region, the others in another."""
    assert stages(moved(contributions, results), (7, 7, 9, 9), 0) == expected
    assert expected <= set(STAGES)


def test_without_regions_what_comes_is_of_others() -> None:
    """A flat plan names no groups: contributions are as from another region."""
    assert stages(moved((0, 1), (0, 0)), (), 0) == {"means"}
