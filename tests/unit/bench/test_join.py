"""What `bench join` makes of what its processes noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import join_matrix
from p2pavg.bench.join import verb
from p2pavg.bench.join.figures import figures
from p2pavg.lab.topology import load


def epoch(number: int, at: float, samples: int = 20, parameters: str = "") -> dict[str, Any]:
    return {
        "epoch": number,
        "at": at,
        "parameters": parameters or f"p{number}",
        "local_samples": samples,
        "bytes_sent": 1_250_000,
        "bytes_received": 1_250_000,
    }


def donor(slow: float = 0.0) -> dict[str, Any]:
    """Epochs of one second; the one in which the newcomer comes takes longer."""
    ends = [float(n) for n in range(1, 11)] + [11.0 + slow + n for n in range(4)]
    return {"applied": [epoch(n, at) for n, at in enumerate(ends)], "extra_memory_bytes": 7}


def newcomer(**changes: Any) -> dict[str, Any]:
    return {
        "began": 10.2,
        "loaded_at": 10.9,
        "state_bytes": 50_000_000,
        "received_bytes": 60_000_000,
        "result_bytes": 5_000_000,
        "donors": 3,
        "arrivals": [(10.4, 0), (10.5, 20_000_000), (10.8, 50_000_000)],
        "applied": [epoch(10, 10.95, 0), epoch(11, 12.0, 15)],
    } | changes


def test_samples_per_second_are_those_of_whole_epochs() -> None:
    """An epoch that took a quarter longer while the newcomer came leaves 0.8 of a donor's samples/s."""
    found = figures([newcomer()], [donor(), donor(0.25), donor(0.25)], None, 3)
    assert found["donor_sps_ratio"] == pytest.approx(0.8)
    assert found["donor_sps_ratio_lowest"] == pytest.approx(0.8)
    assert found["share_of_links"] is None


def test_a_newcomer_that_takes_less_than_an_epoch_slows_none() -> None:
    """Whoever contributes to the epoch in which it came leaves no epoch to compare, and the words say so."""
    found = figures([newcomer(applied=[epoch(10, 11.0, 3)])], [donor()], None, 1)
    assert found["donor_sps_ratio"] is None
    assert "less than an epoch" in verb._words({**found, "joiners": 1})[1]


def test_the_transfer_is_compared_with_what_epochs_leave_of_the_links() -> None:
    """1 Gb/s over 0.4 s, where three donors of 1 Gb/s give a newcomer of 2 Gb/s less what epochs take."""
    found = figures([newcomer()], [donor()] * 3, load("join-4"), 3)
    assert found["gbps"] == pytest.approx(1.0)
    assert found["links_left_gbps"] == pytest.approx(2.0 - 0.01)
    assert found["share_of_links"] == pytest.approx(1.0 / 1.99)
    assert found["seconds"] == pytest.approx(0.7)
    assert found["received_over_state"] == pytest.approx(1.1)
    assert found["donor_extra_memory_bytes"] == 7


def test_epochs_between_the_state_and_the_first_contribution_are_missed() -> None:
    """Who has the state in epoch 10, and contributes to the next, missed none; to the one after it, one."""
    assert figures([newcomer()], [donor()], None, 1)["epochs_missed"] == 1
    prompt = newcomer(applied=[epoch(10, 11.0, 3)])
    assert figures([prompt], [donor()], None, 1)["epochs_missed"] == 0


def test_cells_of_the_matrix_stand_beside_earlier_ones(tmp_path: Path) -> None:
    """A cell that is measured again takes the place of its figures; the others stay, in the order of all."""
    file = tmp_path / "matrix.json"
    for name, in_s in (("far/0.6s/5MB", 1.0), ("home-4/0.3s/5MB", 2.0), ("far/0.6s/5MB", 3.0)):
        found = {"bars": {"in_s": in_s}, "bit_identical": True, "environment": {}}
        join_matrix.write(file, {name: found})
    cells = json.loads(file.read_text())["cells"]
    assert [(name, cell["in_s"]) for name, cell in cells.items()] == [
        ("home-4/0.3s/5MB", 2.0),
        ("far/0.6s/5MB", 3.0),
    ]


def test_other_parameters_after_an_epoch_are_seen() -> None:
    """One peer with other parameters after one epoch is no run of equal bits."""
    assert figures([newcomer()], [donor()], None, 1)["bit_identical"]
    other = donor()
    other["applied"][11] = epoch(11, 12.0, parameters="x")
    assert not figures([newcomer()], [donor(), other], None, 2)["bit_identical"]
