"""What a user of outer steps is told about rounds that computation does not hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.optim.outer.advice import Advisor, advise, choices
from p2pavg.report import RoundReport
from tests.unit.report.reports import report


def test_coarser_codecs_hide_behind_fewer_steps() -> None:
    """A round of 10 s beside 30 steps of 1 s in all hides behind 300 steps, in int8 behind three quarters of
    that, in int4 behind three eighths, each rounded up.
    """
    found = {one.codec: one.steps for one in choices(30, 1.0, 10.0, "fp16")}
    assert found["fp16"] == 300
    assert 225 <= found["int8"] <= 227
    assert 112 <= found["int4"] <= 114
    assert [one.codec for one in choices(30, 1.0, 10.0, "int4")] == ["int4"]
    assert choices(30, 100.0, 0.001, "int8")[0].steps == 1


def _short(slow: RoundReport, transfer: float) -> RoundReport:
    """The report of a round of `transfer` s beside local steps of 0.6 s."""
    times = {"seconds_matchmaking": 0.0, "seconds_commit": 0.0, "seconds_calculation": 0.6}
    return replace(slow, seconds_transfer=transfer, **times)


def test_it_is_told_only_where_it_helps() -> None:
    """Nothing is said of a round that is hidden, of one of a moment, of a peer alone, or of a codec of the
    user's.
    """
    slow = replace(report(), codec="int8", seconds_transfer=9.0, seconds_calculation=1.0)
    told = advise(slow, 30, 0)
    assert told is not None
    assert "30 local steps" in told
    assert "Outer(overlap=1)" in told
    assert "with int4" in told
    assert "overlap=1" not in (advise(slow, 30, 2) or "")
    assert advise(replace(slow, seconds_calculation=1e4), 30, 0) is None
    assert advise(_short(slow, 0.04), 22, 0) is None
    assert advise(_short(slow, 0.4), 22, 0) is not None
    assert advise(replace(slow, members=slow.members[:1]), 30, 0) is None
    assert advise(replace(slow, codec="mine (wire id 64)"), 30, 0) is None


def test_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the fourth average, of the local steps since the third."""
    advisor, slow = Advisor(0), report(codec="int8", seconds_transfer=9.0, seconds_calculation=1.0)
    for number in range(60):
        assert bool(caplog.records) == (number >= 40)
        advisor.step(number % 10 == 9, lambda: slow)
    assert "of 10 local steps" in caplog.text
    assert len(caplog.records) == 1
