"""The library that moves one process's wall clock: the tests' own, compiled once per run."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "tests" / "swarm" / "clock.c"


def build_shim(folder: Path) -> Path | None:
    """To be loaded with LD_PRELOAD. None: no compiler is here."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    built = folder / "clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl"], check=True)
    return built


def jump(file: Path, seconds: float) -> None:
    """Move the clock of whoever has this file as WRONG_CLOCK."""
    with file.open("r+b") as clock:
        clock.write(struct.pack("d", seconds))
