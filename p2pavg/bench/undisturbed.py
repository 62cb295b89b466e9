"""A clock that stands still while this thread is ready to run and other processes have the cores."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

WAITED = Path("/proc/thread-self/schedstat")


def undisturbed() -> float:
    """Seconds of this thread, as on a machine that does nothing else; of the wall where the kernel does not
    tell how long the thread waited for a core.
    """
    waited = 0.0
    with suppress(OSError, ValueError, IndexError):
        waited = int(WAITED.read_text().split()[1]) * 1e-9
    return time.perf_counter() - waited
