"""A progress line on the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROGRESS_AFTER_S = 2.0
BEAT_S = 0.2


@contextmanager
def progress(
    text: str, total: float | None = None, *, by_clock: bool = False
) -> Iterator[Callable[[float], None]]:
    """Yield `advance(amount)`. A progress line shows on a terminal's stderr once two seconds have passed.

    by_clock: the total is seconds, and the line moves by itself.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%" if total is not None else ""),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(text, total=total)
    timer = threading.Timer(PROGRESS_AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    over = threading.Event()
    if by_clock and total is not None:
        threading.Thread(target=_move, args=(bar, task, total, over), daemon=True).start()
    try:
        yield lambda amount: bar.advance(task, amount)
    finally:
        over.set()
        timer.cancel()
        timer.join()
        bar.stop()


def _move(bar: Any, task: Any, seconds: float, over: threading.Event) -> None:
    began = time.monotonic()
    while not over.wait(BEAT_S):
        bar.update(task, completed=min(seconds, time.monotonic() - began))
