"""Memory that this process takes now, of the machine and of its accelerator."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_KIB = 1024


def resident_bytes() -> int:
    """Bytes of this process in the machine's memory; where the kernel does not say, the most there were."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * _KIB
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Bytes that torch holds on CUDA devices; 0 where it has not begun to use one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return sum(int(torch.cuda.memory_reserved(device)) for device in range(torch.cuda.device_count()))
