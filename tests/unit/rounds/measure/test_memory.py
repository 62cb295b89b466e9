"""What a process says of its memory."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from p2pavg.rounds.measure import memory


def test_the_peak_stays_when_memory_is_given_back() -> None:
    """64 MB that were in use count in the peak after they are free, and the machine has more than that."""
    before = memory.report().host_peak  # of the tests before, too, whose garbage may go meanwhile
    size = before - memory.resident_bytes() + 64_000_000
    # A mapping goes when it is closed. An allocator may keep what is freed, and did after other tests.
    with mmap.mmap(-1, size) as block:
        np.frombuffer(block, np.uint8).fill(1)
        held = memory.resident_bytes()
    told = memory.report()
    assert told.host_peak >= held - 4_000_000  # the kernel counts in pieces
    assert memory.resident_bytes() < held - 60_000_000
    assert told.host > told.host_peak
    assert told.device_peak == told.device == 0


def test_a_machine_that_tells_little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the kernel's files the peak is what the process accounting says, and the machine is unknown."""
    for name in ("_STATUS", "_MEMINFO", "_LIMIT"):
        monkeypatch.setattr(memory, name, tmp_path / "none")
    told = memory.report()
    assert told.host_peak == 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert told.host == 0


@pytest.mark.parametrize(("limit", "said"), [("2000000000\n", 2_000_000_000), ("max\n", 8_192_000_000)])
def test_a_container_has_no_more_than_its_limit(
    limit: str, said: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine's memory, or the container's limit where there is one."""
    (tmp_path / "meminfo").write_text("MemTotal:        8000000 kB\nMemFree:  10 kB\n")
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "limit")
    assert memory.report().host == said


def test_the_accelerator_that_holds_most_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two devices the one of which torch took most, with all the memory that it has."""
    peaks, sizes = [5, 70], [100, 200]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_reserved=peaks.__getitem__,
        get_device_properties=lambda at: SimpleNamespace(total_memory=sizes[at]),
    )
    monkeypatch.setitem(memory.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert (memory.report().device_peak, memory.report().device) == (70, 200)
    peaks[:] = [0, 0]
    assert (memory.report().device_peak, memory.report().device) == (0, 0)
