"""The clock that other processes do not move."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2pavg.bench import undisturbed


def test_time_in_a_queue_for_a_core_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells how long the thread was ready to run and did not: the clock stands still meanwhile."""
    told, wall = tmp_path / "schedstat", [100.0]
    monkeypatch.setattr(undisturbed, "WAITED", told)
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    told.write_text("5000000000 2000000000 7")
    begun = undisturbed.undisturbed()
    wall[0] += 3.0
    told.write_text("6000000000 4500000000 9")
    assert undisturbed.undisturbed() - begun == pytest.approx(0.5)


@pytest.mark.parametrize("text", [None, "", "nonsense here"])
def test_where_the_kernel_does_not_tell_the_wall_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """Other systems have no such file."""
    told = tmp_path / "schedstat"
    if text is not None:
        told.write_text(text)
    monkeypatch.setattr(undisturbed, "WAITED", told)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    assert undisturbed.undisturbed() == 7.0
