"""How long a donor is waited for that is busy, or that owes something: as long as an honest one needs."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.rounds.state.trust.patience import (
    ANSWER_S,
    COPIED_BPS,
    MOST_OWED,
    PAUSED_S,
    SLOWEST_BPS,
    STATE_BYTES,
    Credit,
    Patience,
    most_credit,
)

NUMEL = 600_000_000
TEN_GB = 10_000_000_000


def waited(numel: int, *answers: dict[str, Any], forever: dict[str, Any] | None = None) -> float:
    """Seconds for a donor that gives these answers, one each two seconds; then the last one, counted up."""
    patience, now, said = Patience(0.0, numel), 0.0, list(answers)
    while patience.left(now) > 2.0:
        now += 2.0
        if said:
            patience.busy(now, said.pop(0))
        elif forever is not None:
            patience.busy(now, {**forever, "done": int(now * forever["done"])})
    return now + patience.left(now)


@pytest.mark.parametrize(
    "answers", [[], [{}] * 99, [{"bytes": TEN_GB, "done": 5}] * 99, [{"bytes": -1, "done": 1, "rest": "x"}]]
)
def test_a_donor_that_gets_no_further_is_given_up_within_seconds(answers: list[dict[str, Any]]) -> None:
    """Whatever it says: mute, busy without a word, busy with the same word."""
    assert waited(NUMEL, *answers) <= ANSWER_S + 2.0


def test_a_donor_that_copies_ten_gigabytes_is_waited_for() -> None:
    """While it gets further: at 150 MB/s it takes more than a minute, and it may rest before that."""
    busy = [{"bytes": TEN_GB, "done": int(150e6 * second)} for second in range(2, 68, 2)]
    assert waited(NUMEL, *busy) > 68
    resting = [{"bytes": TEN_GB, "done": 0, "rest": 40.0}, *[{"bytes": TEN_GB, "done": 0}] * 19]
    assert waited(NUMEL, *resting) > 40


@pytest.mark.parametrize("rest", [0.0, 1e9, float("inf"), float("nan")])
def test_what_a_busy_donor_promises_is_bounded_by_what_is_expected(rest: float) -> None:
    """A state of a size that the model cannot have buys no time, nor does a rest without end."""
    for numel, most in ((1_000_000, 0.2), (NUMEL, STATE_BYTES * NUMEL / COPIED_BPS)):
        lie = {"bytes": 1 << 60, "done": 1 << 40, "rest": rest}
        assert waited(numel, forever=lie) <= ANSWER_S + most


def test_a_donor_that_sends_something_else_is_not_waited_for() -> None:
    """Seconds pass while it owes something, and only what is wanted earns new ones: a small chunk now and
    then does not keep it.
    """
    small = 16 << 10
    most = most_credit(0.3, 4 * small, 0.0)
    assert ANSWER_S < most < ANSWER_S + 3
    assert most_credit(99.0, 1 << 40, 0.0) <= ANSWER_S + 4 + MOST_OWED / SLOWEST_BPS
    credit, seconds = Credit(most), 0.0
    while credit.left > 0:
        credit.passed(0.1)
        seconds += 0.1
        if round(seconds, 1) % 3 == 0:
            credit.brought(small, most)
    assert seconds < 1.2 * most


@pytest.mark.parametrize(("rate", "chunk"), [(2.5e6, 1 << 20), (2.5e6, 16 << 10), (70e3, 64 << 10)])
def test_an_honest_slow_donor_keeps_its_place(rate: float, chunk: int) -> None:
    """Over 20 Mb/s and over less than one, in chunks of any size: with four or more of them on their way."""
    owed = max(4 * chunk, int(25e6 * 0.3))
    credit = Credit(most_credit(0.3, owed, 0.0))
    for _ in range(200):
        for _ in range(10):
            credit.passed(chunk / rate / 10)
        credit.brought(chunk, most_credit(0.3, owed, rate))
        assert credit.left > 0


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    """Nothing could come then."""
    credit = Credit(2 * PAUSED_S)
    credit.passed(3600.0)
    assert credit.left == PAUSED_S
