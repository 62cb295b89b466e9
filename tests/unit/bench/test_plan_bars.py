"""`bench.plans`: figures beside their bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.plans.__main__ import FIRST, row
from bench.plans.planning import milliseconds
from bench.tables import plans, results
from p2pavg.allreduce.choosing import Topology
from p2pavg.lab.topology import load


@pytest.mark.parametrize(
    ("found", "most", "holds"),
    [(1.0, True, True), (1.1, True, False), (0.9, False, False), (1.0, False, True), (None, True, None)],
)
def test_a_figure_is_held_against_its_bar(found: float | None, most: bool, holds: bool | None) -> None:
    """At most, or at least, so much; what was not measured neither holds nor misses."""
    assert row("what", found, 1.0, most=most)["holds"] is holds


def test_the_table_marks_what_misses_its_bar_and_where_the_lab_was_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sections that are there, in one table."""
    content: dict[str, Any] = {
        "lockstep": [row("seconds", 1.5, 1.3, most=True, late=True)],
        "uplinks": [row("times", 2.8, 2.7, most=False, late=False)],
        "failed": {"clouds": "a worker ended"},
        "environment": {"date": "2026-01-01T00:00", "cores": 2, "cpu": "CPU", "load_1min": 0.5},
    }
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert plans.plans() == ""
    (tmp_path / "plans.json").write_text(json.dumps(content))
    told = plans.plans()
    assert "| seconds | ≤ 1.3 | **1.5*** |" in told.replace("1.30", "1.3").replace("1.50", "1.5")
    assert "| times | ≥ 2.7 | 2.8 |" in told.replace("2.70", "2.7").replace("2.80", "2.8")
    assert "late" in told
    assert "clouds failed: a worker ended." in told


def test_first_rounds_are_measured_over_networks_that_exist() -> None:
    """Every network whose links are long enough to be remembered."""
    assert all(len(load(name).hosts) > 1 for name in FIRST)


@pytest.mark.parametrize("topology", list(Topology))
def test_planning_for_sixty_four_takes_milliseconds(topology: Topology) -> None:
    """With all rates of pairs known, in CPU time, the best of five: some times the bar, which `bench.plans`
    holds against an idle machine, and less than half of what planning once took.
    """
    assert milliseconds((8,) * 8, topology, first=False) < 30
