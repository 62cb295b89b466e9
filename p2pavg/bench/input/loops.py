"""How long whole loops take, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 0.6  # seconds for which a split is timed at least
LEAST_LOOPS = 3


def timed(loop: Callable[[int], None]) -> list[float]:
    """Seconds of each loop, given its number, except the first, which is warm-up."""
    loop(0)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < LEAST_LOOPS or time.perf_counter() - began < LEAST_S:
        begun = time.perf_counter()
        loop(len(seconds) + 1)
        seconds.append(time.perf_counter() - begun)
    return seconds
