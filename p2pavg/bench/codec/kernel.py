"""A kernel to time, and the result of timing many kernels, for the CPU and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COPY = "copy"


@dataclass(frozen=True)
class Kernel:
    """One thing to time: `run()` reads and writes `moved` bytes."""

    name: str
    moved: int
    run: Callable[[], object]


def summary(device: str, implementation: str, numel: int, rates: dict[str, float]) -> dict[str, Any]:
    """The JSON result; `rates` are GB/s by kernel, the plain copy under `COPY`."""
    copy = rates[COPY]
    return {
        "device": device,
        "implementation": implementation,
        "numel": numel,
        "copy_gb_per_s": copy,
        "kernels": [
            {"name": name, "gb_per_s": rate, "fraction_of_copy": rate / copy}
            for name, rate in rates.items()
            if name != COPY
        ],
    }
