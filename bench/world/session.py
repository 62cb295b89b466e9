"""How much of the processors the run's session gets."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def as_nice_as_this() -> None:
    """Give the session the niceness that this process has. Where the kernel shares processors between
    sessions, as desktops' do, nice alone counts among the processes of one session only.
    """
    with suppress(OSError):
        AUTOGROUP.write_text(str(os.nice(0)))
