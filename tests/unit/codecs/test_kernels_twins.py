"""The C++ kernels of this and of other processors, by cross compiler and emulator where those are there."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "csrc" / "cpu"
ARM_PARTS = {"neon.cpp": (), "crc32_arm.cpp": ("-march=armv8-a+crc",)}
X86_PARTS = {
    "avx2.cpp": ("-mavx2", "-mf16c"),
    "crc32_pclmul.cpp": ("-msse4.1", "-mpclmul"),
    "crc32_vpclmul.cpp": ("-mavx512f", "-mvpclmulqdq"),
}
COMMON_PARTS = dict.fromkeys(
    ("kernels.cpp", "portable.cpp", "crc32.cpp", "sparse.cpp", "tests/twins.cpp"), ()
)
DIGEST = "4474975a"
"""Of all that the kernels make of the program's pseudo-random runs: changes only with the wire format."""

HERE = platform.machine() in ("x86_64", "AMD64")
TARGETS = {
    "x86-64": ("g++" if HERE else "x86_64-linux-gnu-g++", () if HERE else ("qemu-x86_64",), X86_PARTS),
    "AArch64": (
        "aarch64-linux-gnu-g++" if HERE else "g++",
        ("qemu-aarch64",) if HERE else (),
        ARM_PARTS,
    ),
}


@pytest.mark.parametrize("target", TARGETS)
def test_all_processors_make_the_same_bytes(target: str, tmp_path: Path) -> None:
    """Every instruction set of every processor has the digest that all others have."""
    compiler, emulator, parts = TARGETS[target]
    missing = [tool for tool in (compiler, *emulator) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    flags = [compiler, "-O2", "-std=c++17", "-ffp-contract=off", "-c"]
    objects = []
    for name, extra in {**COMMON_PARTS, **parts}.items():
        objects.append(str(tmp_path / Path(name).with_suffix(".o").name))
        subprocess.run([*flags, *extra, str(SOURCES / name), "-o", objects[-1]], check=True, timeout=100)
    program = str(tmp_path / "twins")
    subprocess.run([compiler, "-static", *objects, "-o", program], check=True, timeout=100)
    done = subprocess.run([*emulator, program], capture_output=True, text=True, check=True, timeout=100)
    told = dict(line.split() for line in done.stdout.splitlines())
    assert "portable" in told
    assert len(told) > 1 or target == "x86-64"
    assert set(told.values()) == {DIGEST}
