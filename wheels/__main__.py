"""`python -m wheels`: build and audit the wheels that this machine can build."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"
GLIBC = "2.28"  # of Debian 10, Ubuntu 20.04, RHEL 8, and all since: what torch's wheels need, too
ARCHITECTURES = ("x86_64", "aarch64")
# zig has a word of its own for a processor with CRC instructions.
AS_ZIG_SAYS = """for word; do
    shift
    [ "$word" = -march=armv8-a+crc ] && word=-mcpu=generic+crc
    set -- "$@" "$word"
done
"""
NEWEST = 14  # of Python 3 that is looked for


def main() -> int:
    """Build; the exit code is 1 when a wheel that was to be built was not."""
    parser = argparse.ArgumentParser(prog="python -m wheels", description="Builds the wheels of p2pavg.")
    parser.add_argument(
        "--arch", nargs="+", choices=ARCHITECTURES, default=[platform.machine()], help="default: this one's"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    args = parser.parse_args()
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        parser.error("this builds on Linux; .github/workflows/wheels.yml builds elsewhere")
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = False
    for tag, python in pythons():
        if python is None:
            print(f"{tag}: left out, since no such Python with its headers is here")
            continue
        tools = installed(tag, python)
        for arch in args.arch:
            failed |= not built(tag, tools, arch, args.out)
    return int(failed)


def pythons() -> Iterator[tuple[str, Path | None]]:
    """Per wheel: its tag, and an interpreter that builds it."""
    yield "cp311", found(11)
    later = (found(minor) for minor in range(12, NEWEST + 1))
    yield "cp312-abi3", next((python for python in later if python is not None), None)


def found(minor: int) -> Path | None:
    """A Python 3.minor that has its headers: of the PATH, or one of pyenv's, which need not be there."""
    on_path = shutil.which(f"python3.{minor}")
    pyenv = (
        Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/3.{minor}.*/bin/python")
    )
    header = "pathlib.Path(sysconfig.get_paths()['include'], 'Python.h')"
    asked = f"import pathlib, sys, sysconfig; assert {header}.exists();"
    for candidate in ([] if on_path is None else [Path(on_path)]) + sorted(pyenv):
        done = subprocess.run(
            [candidate, "-c", f"{asked} print(sys.version_info[1], sys.executable)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and done.stdout.split(maxsplit=1)[0] == str(minor):
            return Path(done.stdout.split(maxsplit=1)[1].strip())
    return None


def installed(tag: str, python: Path) -> Path:
    """The programs of an environment that has the build tools."""
    venv, wanted = BUILD / f"tools-{tag}", ROOT / "constraints" / "wheel.txt"
    mark = venv / "installed.txt"
    if not mark.exists() or mark.read_bytes() != wanted.read_bytes():
        print(f"{tag}: installing the build tools", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", wanted], check=True)
        mark.write_bytes(wanted.read_bytes())
    return venv / "bin"


def built(tag: str, tools: Path, arch: str, out: Path) -> bool:
    """Build one wheel, audit it, and put it into `out`. Says what came of it."""
    began = time.monotonic()
    raw = BUILD / f"{tag}-{arch}"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    log = raw.with_suffix(".log")
    command = [
        tools / "python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        raw,
        ROOT,
    ]
    for setting in settings(tools, tag, arch):
        command += ["--config-settings", setting]
    with log.open("w") as written:
        done = subprocess.run(
            command, env=environment(tools, tag, arch), stdout=written, stderr=subprocess.STDOUT, check=False
        )
    wheels = list(raw.glob("*.whl"))
    if done.returncode or not wheels:
        print(f"{tag}, {arch}: not built; {log} says why")
        return False
    audited_into = raw / "audited"
    audit = [tools / "python", "-m", "auditwheel", "repair", "--wheel-dir", audited_into, wheels[0]]
    audited = subprocess.run(
        audit,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if audited.returncode:
        print(f"{tag}, {arch}: {(audited.stderr.strip().splitlines() or ['auditwheel refuses'])[-1]}")
        return False
    (found,) = audited_into.glob("*.whl")
    if (least := glibc(found.name)) is None or least > tuple(map(int, GLIBC.split("."))):
        print(f"{tag}, {arch}: {found.name} needs a newer glibc than {GLIBC}")
        return False
    out.mkdir(parents=True, exist_ok=True)
    for before in out.glob(f"p2pavg-*-{tag}*{arch}.whl"):
        before.unlink()
    made = Path(shutil.move(found, out / found.name))
    size = made.stat().st_size / 1e6
    print(f"{made}: {size:.1f} MB, {has_cuda(made)}, {time.monotonic() - began:.0f} s", flush=True)
    return True


def glibc(name: str) -> tuple[int, int] | None:
    """The oldest glibc on which a wheel of this name runs, by the tags that auditwheel gave; None: none of
    them tells.
    """
    found = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", name)]
    return min(found, default=None)


def has_cuda(wheel: Path) -> str:
    """In words."""
    with zipfile.ZipFile(wheel) as archive:
        inside = any(name.startswith("p2pavg/_cuda.") for name in archive.namelist())
    return "with the CUDA module" if inside else "without the CUDA module"


def settings(tools: Path, tag: str, arch: str) -> Iterator[str]:
    """For scikit-build-core."""
    folder = programs(tools, tag, arch)
    yield f"build-dir={BUILD / f'cmake-{tag}-{arch}'}"
    yield f"cmake.define.CMAKE_AR={folder / 'ar'}"
    yield f"cmake.define.CMAKE_RANLIB={folder / 'ranlib'}"
    yield "install.strip=false"  # the linker does it, for any architecture
    if arch != platform.machine():
        yield "cmake.define.CMAKE_SYSTEM_NAME=Linux"
        yield f"cmake.define.CMAKE_SYSTEM_PROCESSOR={arch}"
        yield "cmake.define.P2PAVG_CUDA=OFF"


def environment(tools: Path, tag: str, arch: str) -> dict[str, str]:
    """For the compilers; for another architecture than this one, what a Python there would say, too."""
    folder = programs(tools, tag, arch)
    given = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CC": str(folder / "cc"),
        "CXX": str(folder / "c++"),
        "LDFLAGS": "-Wl,-s",
    }
    if host := shutil.which("g++"):
        given["CUDAHOSTCXX"] = host
    if arch != platform.machine():
        given["_PYTHON_HOST_PLATFORM"] = f"linux-{arch}"
        suffix = f".cpython-311-{arch}-linux-gnu.so" if tag == "cp311" else ".abi3.so"
        given["SETUPTOOLS_EXT_SUFFIX"] = suffix
    return given


def programs(tools: Path, tag: str, arch: str) -> Path:
    """A folder with zig's compilers under the names and with the one argument that CMake calls."""
    folder = BUILD / f"zig-{tag}-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    target = f" -target {arch}-linux-gnu.{GLIBC}"
    for name, more in (("cc", target), ("c++", target), ("ar", ""), ("ranlib", "")):
        program = folder / name
        command = f'exec "{tools / "python"}" -m ziglang {name}{more} "$@"'
        program.write_text(f"#!/bin/sh\n{AS_ZIG_SAYS if target in more else ''}{command}\n")
        program.chmod(0o755)
    return folder


if __name__ == "__main__":
    sys.exit(main())
