"""What the training thread's handle tells the loop thread, and when."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from p2pavg.errors import ClosedError
from p2pavg.rounds import session as module
from p2pavg.rounds.session import NEAR_S, REPORT_INTERVAL_S, Session
from p2pavg.rounds.training import Contribution, KeepGoing, Outcome


class Loop:
    """Notes what is posted."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    def call_soon_threadsafe(self, method: Any, *arguments: object) -> None:
        self.posted.append(method)


class Side:
    progress = "progress"
    arrived = "arrived"
    withdrawn = "withdrawn"
    refused = "refused"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def connected(target: int, others: int | None) -> tuple[Session, Loop]:
    loop = Loop()
    session = Session(loop, 0, lambda: None)  # type: ignore[arg-type]
    session.connect(Side())  # type: ignore[arg-type]
    session.set_stop(others, target)
    return session, loop


def test_count_wakes_nobody_before_the_target_is_near(clock: list[float]) -> None:
    """While the target is further than NEAR_S away at the swarm's pace, nothing is posted to the loop."""
    session, loop = connected(10_000, 0)
    for _ in range(1000):  # 100 samples/s: 100 s to the target
        clock[0] += 0.04
        assert session.count(4) is False
    assert loop.posted == []
    assert session.samples() == 4000
    session.set_stop(5_970, 10_000)  # the others brought theirs: 30 samples are left, at 249 a second
    clock[0] += 0.04
    assert session.count(4) is False
    assert loop.posted == ["progress"]


def test_count_tells_at_most_once_per_interval(clock: list[float]) -> None:
    """Near the target, the loop is told every REPORT_INTERVAL_S, whatever the pace of steps."""
    session, loop = connected(1000, 0)
    for _ in range(900):
        clock[0] += 0.001
        session.count(1)
    near = 0.9 - (1.0 - NEAR_S)  # seconds, at 1000 samples a second
    assert abs(len(loop.posted) - near / REPORT_INTERVAL_S) <= 2


@pytest.mark.parametrize(("others", "stops"), [(None, False), (0, False), (996, True)])
def test_count_stops_where_the_target_is_reached(clock: list[float], others: int | None, stops: bool) -> None:
    """The training thread stops at the sample that completes the target, as far as others are known."""
    session, _ = connected(1000, others)
    clock[0] += 1.0
    assert session.count(4) is stops


@pytest.mark.parametrize("how", ["target", "stop", "failure"])
def test_who_has_nothing_to_compute_is_woken_by_the_next_word(how: str) -> None:
    """wait_until_wanted returns when the target is reached, a round forms, or all is over."""
    session, _ = connected(4, 0)
    session.count(1)
    assert session.wait_until_wanted(0.001) is False
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(session.wait_until_wanted(60.0)))
    waiting.start()
    if how == "target":
        session.set_stop(3, 4)
    elif how == "stop":
        session.set_attention(True)
    else:
        session.fail(ClosedError("over"))
    waiting.join(30.0)
    assert woken == [True]


def test_a_report_that_was_not_there_in_time_comes_with_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that was stopped while it waited for an epoch's report still gets it, not the one before."""
    monkeypatch.setattr(module, "REPORT_TIMEOUT_S", 0.0)
    session, _ = connected(100, None)
    session._recorded = recorded = Future()
    assert session.last_report is None
    report: Any = object()
    recorded.set_result(report)
    assert session.last_report is report


def test_what_a_peer_left_and_is_not_used_is_named() -> None:
    """A refused inheritance changes no count here; the loop names its samples in the next report."""
    session, loop = connected(1000, 0)
    session.refused(7, "drawn by another peer too")
    assert loop.posted == ["refused"]
    assert session.samples() == 0


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_signal_handler_may_raise_timeout_error(timeout: float | None) -> None:
    """What a handler of SIGALRM raises while the training thread waits comes out of the call, as the wait's
    own
    end would not: the samples stay, and nobody takes the error for the end of the wait.
    """
    session, loop = connected(4, 0)

    def ring(*_: object) -> None:
        raise TimeoutError("the user's alarm")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError, match="the user's alarm"):
            session.arrive(Contribution(None, 0.0, 0), timeout)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert loop.posted == ["arrived"]


def test_a_wait_with_a_deadline_is_withdrawn_at_its_end() -> None:
    """When nothing came in time, the loop thread is told, and its word is the outcome."""
    session, loop = connected(4, 0)

    def withdrawn(answer: Future[Outcome]) -> None:
        answer.set_result(KeepGoing())

    def post(method: Any, *arguments: Any) -> None:
        loop.posted.append(method)
        if method == "withdrawn":
            withdrawn(*arguments)

    loop.call_soon_threadsafe = post  # type: ignore[method-assign]
    assert session.arrive(Contribution(None, 0.0, 0), 0.01) == KeepGoing()
    assert loop.posted == ["arrived", "withdrawn"]
