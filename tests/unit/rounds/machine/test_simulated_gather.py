"""All-gathers under a virtual clock: they keep all promises, and bugs in them are found."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.plan import Plan
from tests.simulation import process
from tests.simulation.jobs import Job, Value
from tests.simulation.schedule import Schedule

SEEDS = 60


@pytest.fixture(autouse=True)
def all_gathered(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every group of two voters or more exchanges its contributions; the plans that were made."""
    made: list[Plan] = []
    plan = process.plan

    def noted(members: Any) -> Plan:
        made.append(plan(members))
        return made[-1]

    monkeypatch.setattr(process, "GATHERED", 1.0)
    monkeypatch.setattr(process, "plan", noted)
    return made


def broken(seed: int) -> bool:
    return Schedule(seed, peers=5, plain=True).run().broken is not None


def twice(value: Value) -> Value:
    """An owner has its contribution two times in its part."""
    return Value(value + value)


def dropped(value: Value) -> Value:
    """An owner gives everybody zeros for its contribution."""
    return Value()


@pytest.mark.parametrize("bug", [twice, dropped])
def test_a_wrong_part_is_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted twice, or dropped by its owner: a schedule breaks a promise."""
    returned = Job._returned

    def wrong(job: Job, part: int, value: Value) -> None:
        returned(job, part, bug(value) if part in job.children else value)

    monkeypatch.setattr(Job, "_returned", wrong)
    assert any(map(broken, range(SEEDS)))


def test_all_gathers_keep_all_promises(all_gathered: list[Plan]) -> None:
    """Among faults of all kinds, groups that exchange their contributions commit what was announced."""
    verdicts = [Schedule(seed, peers=4).run() for seed in range(25)]
    assert [verdict.broken for verdict in verdicts if verdict.broken] == []
    assert sum(plan.gathers for plan in all_gathered) > 100
