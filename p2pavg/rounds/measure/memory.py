"""Memory that this process takes, now and at most, and that there is: of the machine and of accelerators."""

from __future__ import annotations

import functools
import os
import resource
import sys
from pathlib import Path
from typing import Any

from p2pavg.report import MemoryReport

_KIB = 1024
_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the container


def resident_bytes() -> int:
    """Bytes of this process in the machine's memory; where the kernel does not say, the most there were."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _most_ever()
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Bytes that torch holds on CUDA devices; 0 where it has not begun to use one."""
    cuda = _cuda()
    if cuda is None:
        return 0
    return sum(int(cuda.memory_reserved(device)) for device in range(cuda.device_count()))


def report() -> MemoryReport:
    """The most that this process took so far, and what there is."""
    host_peak, host = _kib(_STATUS, "VmHWM") or _most_ever(), _host(_MEMINFO, _LIMIT)
    cuda = _cuda()
    if cuda is None:
        return MemoryReport(host_peak, host)
    peak, device = max((int(cuda.max_memory_reserved(at)), at) for at in range(cuda.device_count()))
    if not peak:
        return MemoryReport(host_peak, host)
    return MemoryReport(host_peak, host, peak, int(cuda.get_device_properties(device).total_memory))


def _cuda() -> Any:
    """`torch.cuda` where it is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda


@functools.cache  # reports are made in every round, and this stays as it is
def _host(machine: Path, container: Path) -> int:
    """Bytes of the machine, or of this process's container; 0: not known."""
    return min((size for size in (_kib(machine, "MemTotal"), _container(container)) if size), default=0)


def _most_ever() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * _KIB


def _kib(path: Path, name: str) -> int:
    """The value of a line such as "MemTotal: 1234 kB", in bytes; 0: the kernel does not tell."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(row[1]) * _KIB for row in rows if len(row) == 3 and row[0] == f"{name}:"), 0)


def _container(path: Path) -> int:
    """The limit of this process's container; 0: there is none."""
    try:
        limit = path.read_text().strip()
    except OSError:
        return 0
    return int(limit) if limit.isdigit() else 0
