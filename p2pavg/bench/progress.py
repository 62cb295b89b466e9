"""A progress line on the terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_AFTER_S = 2.0


@contextmanager
def progress(text: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Yield `advance(amount)`. A progress line shows on a terminal's stderr once two seconds have passed."""
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
    try:
        yield lambda amount: bar.advance(task, amount)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
