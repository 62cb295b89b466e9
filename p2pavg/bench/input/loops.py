"""How long whole loops take, again and again. The time in which others had the cores is left out."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pavg.bench.undisturbed import undisturbed

LEAST_S = 0.6  # seconds for which a split is timed at least
LEAST_LOOPS = 3
PATIENCE = 3  # times as long by the wall, where others have the cores


def timed(loop: Callable[[int], None]) -> list[float]:
    """Seconds of each loop, given its number, except the first, which is warm-up."""
    loop(0)
    seconds: list[float] = []
    began = undisturbed()
    until = time.monotonic() + PATIENCE * LEAST_S
    while len(seconds) < LEAST_LOOPS or (undisturbed() - began < LEAST_S and time.monotonic() < until):
        begun = undisturbed()
        loop(len(seconds) + 1)
        seconds.append(undisturbed() - begun)
    return seconds
