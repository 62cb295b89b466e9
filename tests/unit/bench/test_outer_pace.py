"""Processes that take their local steps together."""

from __future__ import annotations

import threading
from pathlib import Path

from p2pavg.bench.outer.pace import Pace

DEADLINE_S = 30.0


def test_nobody_runs_ahead_of_one_that_computes(tmp_path: Path) -> None:
    """The fast one begins no step() before the slow one is there too."""
    path = tmp_path / "pace"
    Pace.make(path, 2)
    fast, slow = Pace(path, 0, 2), Pace(path, 1, 2)
    begun = [0, 0]
    ahead: list[int] = []

    def train(index: int, pace: Pace, pause: float) -> None:
        for _ in range(20):
            threading.Event().wait(pause)
            with pace.step():
                begun[index] += 1
                ahead.append(begun[0] - begun[1])
        pace.end()

    threads = [
        threading.Thread(target=train, args=(0, fast, 0.0)),
        threading.Thread(target=train, args=(1, slow, 0.01)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert begun == [20, 20]
    assert max(ahead) <= 1


def test_one_that_waits_for_a_round_is_not_waited_for(tmp_path: Path) -> None:
    """Its step() may need this process: both would wait for each other."""
    path = tmp_path / "pace"
    Pace.make(path, 2)
    here, other = Pace(path, 0, 2), Pace(path, 1, 2)
    over = threading.Event()

    def wait_in_step() -> None:
        with other.step():
            over.wait(DEADLINE_S)

    thread = threading.Thread(target=wait_in_step)
    thread.start()
    with here.step():
        pass
    with here.step():  # begins though the other one has one step less
        over.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
