"""Twelve swarms foretold: how many of them run at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from bench.lab.predicted import CORES_OF, Cores


@pytest.mark.parametrize(("cores", "few", "many"), [(1, 1, 0), (2, 3, 0), (4, 3, 1), (16, 6, 6)])
def test_swarms_run_at_once_as_far_as_cores_go(cores: int, few: int, many: int) -> None:
    """Swarms whose cores are free begin at once, and one more waits until some of them are back."""
    lent, order = Cores(cores), []

    def one_more() -> None:
        with lent.lend(CORES_OF[4]):
            order.append("began")

    late = threading.Thread(target=one_more)
    with ExitStack() as running:
        for peers in [2] * few + [4] * many:
            running.enter_context(lent.lend(CORES_OF[peers]))
        late.start()
        order.append("ended")
    late.join()
    assert order == ["ended", "began"]
