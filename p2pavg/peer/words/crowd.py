"""Several peers of one run on one machine: do their threads get into each other's way?"""

from __future__ import annotations

import os
import sys


def threads_of_torch() -> int:
    """How many threads the calling thread's CPU operations use; 0: torch is not there, or a GPU computes."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return 0
    return int(torch.get_num_threads())


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advice(peers: int, threads: int, of: int) -> str | None:
    """What to tell when `peers` of one machine compute with `threads` each on `of` cores; None: they fit.

    Threads beyond the cores wait for each other at the end of every operation: a step takes ten times as
    long, not twice.
    """
    if threads <= 1 or peers * threads <= of:
        return None
    return (
        f"{peers} peers of this run share this machine's {of} cores, and this one computes with {threads} "
        f"threads: start each with OMP_NUM_THREADS={max(1, of // peers)}, or they slow each other down"
    )
