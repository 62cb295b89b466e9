"""Bugs in the second level of a plan: the checks of the simulation find each, in some schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.jobs import Job, Sums
from tests.simulation.schedule import Schedule

SEEDS = 60


def twice(sums: Sums) -> Sums:
    """A deputy adds what it has a second time."""
    return sums + sums


def own_only(sums: Sums) -> Sums:
    """A deputy forgets all of its region but one member."""
    return sums[:1]


def weighed_again(sums: Sums) -> Sums:
    """What a deputy has weighed already counts with the weight of all it holds."""
    total = sum(weight for _, _, weight in sums)
    return tuple((rank, value, total) for rank, value, _ in sums)


def broken(seed: int) -> bool:
    return Schedule(seed, peers=5, plain=True).run().broken is not None


@pytest.mark.parametrize("swapped", [False, True], ids=["sent on", "swapped"])
@pytest.mark.parametrize("bug", [twice, own_only, weighed_again])
def test_a_wrong_partial_mean_is_found(bug: Any, swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted twice, a region dropped, or weights of another stage: a schedule breaks a promise. Of two that
    swap the one with the bug makes its own result of the wrong mean, too, so that all bits are equal.
    """
    add_up = Job._add_up

    def wrong(job: Job, part: int, given: Any) -> Sums:
        sums = add_up(job, part, given)
        partial = job.plan.sends_partial(part, job.rank) and (job.partners[part] is not None) == swapped
        return bug(sums) if partial and len(sums) > 1 else sums  # type: ignore[no-any-return]

    monkeypatch.setattr(Job, "_add_up", wrong)
    assert any(map(broken, range(SEEDS)))


def test_without_a_bug_these_schedules_keep_all_promises() -> None:
    """It is the bug that is found."""
    assert not any(map(broken, range(10)))
