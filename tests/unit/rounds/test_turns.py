"""How long a thread keeps the interpreter while somebody waits for a round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from p2pavg.rounds.session import Session
from p2pavg.rounds.training import Contribution, KeepGoing
from p2pavg.rounds.turns import TURN_S, short_turns


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_until_the_last_block_ends() -> None:
    """Blocks overlap on threads that know nothing of each other: the interval comes back with the last."""
    first, second = short_turns(), short_turns()
    first.__enter__()
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_turns_are_as_before_after_an_exception() -> None:
    """Ctrl-C while a round is waited for leaves the interval as it was."""
    with pytest.raises(KeyboardInterrupt), short_turns():
        raise KeyboardInterrupt
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize(("before", "meanwhile", "after"), [(0.0001, None, 0.0001), (0.005, 0.02, 0.02)])
def test_what_the_user_chose_stays(before: float, meanwhile: float | None, after: float) -> None:
    """A shorter interval is not made longer, and one that is set inside the block is not undone."""
    sys.setswitchinterval(before)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(min(before, TURN_S))
        if meanwhile is not None:
            sys.setswitchinterval(meanwhile)
    assert sys.getswitchinterval() == pytest.approx(after)


def test_turns_are_short_while_a_training_thread_waits() -> None:
    """From the moment at which a contribution is handed in until its outcome is there."""
    seen: list[float] = []

    class Loop:
        def call_soon_threadsafe(self, method: Any, contribution: Any, answer: Future[Any]) -> None:
            seen.append(sys.getswitchinterval())
            answer.set_result(KeepGoing())

    class Side:
        arrived = "arrived"

    session = Session(Loop(), 0, lambda: None)  # type: ignore[arg-type]
    session.connect(Side())  # type: ignore[arg-type]
    assert session.arrive(Contribution(None, 0.0, 0)) == KeepGoing()
    assert seen == [pytest.approx(TURN_S)]
    assert sys.getswitchinterval() == pytest.approx(0.005)
