"""`python -m wheels.bare WHEEL`: install it beside torch without a compiler, and run the unit tests there,
with each Python of this machine that it fits.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from wheels.__main__ import NEWEST, ROOT
from wheels.__main__ import found as python

MOST_S = 20.0  # that installing may take once torch and the other requirements are there
EXTRAS = "monitor,plot"  # which the tests use, too
# What reads sources of the package, of the C++ or of the documentation, or builds from them.
OF_A_CHECKOUT = ("test_docs.py", "test_release.py", "test_security_page.py", "test_public_names.py")
LOADED = (
    "import p2pavg, sys; from p2pavg import native; print(p2pavg.__file__, native.available()); native.cuda()"
)


def main() -> int:
    """The exit code is the tests'; 1 when installing took too long or the native module is not used."""
    parser = argparse.ArgumentParser(prog="python -m wheels.bare", description="Tries a wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", help="those to try; default: all here that the wheel fits")
    parser.add_argument(
        "--torch", default="torch>=2.11", help="what pip installs as torch; default: %(default)s"
    )
    parser.add_argument("tests", nargs="*", default=["tests/unit"], help="default: tests/unit")
    args = parser.parse_intermixed_args()
    pythons = args.python or [found for minor in fitting(args.wheel.name) if (found := python(minor))]
    if not pythons:
        parser.error(f"no Python that {args.wheel.name} fits is here")
    code = 0
    for one in pythons:
        print(f"with {one}", flush=True)
        with tempfile.TemporaryDirectory(prefix="p2pavg-bare-") as folder:
            code |= tried(args.wheel.resolve(), one, args.torch, args.tests, Path(folder))
    return code


def fitting(name: str) -> range:
    """Which Pythons 3 a wheel of this name fits, by their minor numbers."""
    (least,) = re.findall(r"-cp3(\d+)-", name)
    return range(int(least), NEWEST + 1) if "-abi3-" in name else range(int(least), int(least) + 1)


def tried(wheel: Path, python: str | Path, torch: str, tests: list[str], folder: Path) -> int:
    """Install and test in `folder`."""
    venv = folder / "venv"
    subprocess.run([python, "-m", "venv", venv], check=True)
    inside = {**os.environ, "PATH": without_compilers(folder / "programs", venv), "CC": "", "CXX": ""}
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, torch], check=True, env=inside)
    began = time.monotonic()
    subprocess.run([*pip, "--only-binary", ":all:", wheel], check=True, env=inside)
    took = time.monotonic() - began
    print(f"installed beside torch in {took:.1f} s", flush=True)
    told = subprocess.run(
        [venv / "bin" / "python", "-c", LOADED],
        check=True,
        env=inside,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    print(told.stdout.strip(), flush=True)
    subprocess.run([*pip, *testing(), f"{wheel}[{EXTRAS}]"], check=True, env=inside)
    code = folder / "code"
    for name in ("tests", "bench", "examples", "docs", "pages", "wheels"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", code)
    command = [venv / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    ignored = [f"--ignore=tests/unit/{name}" for name in OF_A_CHECKOUT]
    code_of_tests = subprocess.run([*command, *ignored, *tests], cwd=code, env=inside, check=False).returncode
    return code_of_tests or int(took > MOST_S or not told.stdout.strip().endswith("True"))


def testing() -> list[str]:
    """What the tests are run with, of what developers install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        wanted
        for wanted in project["optional-dependencies"]["dev"]
        if wanted.startswith(("pytest", "hypothesis"))
    ]


def without_compilers(programs: Path, venv: Path) -> str:
    """A PATH with the environment and what the system has in /usr/bin and /bin, less compilers."""
    programs.mkdir()
    compilers = ("cc", "c++", "gcc", "g++", "clang", "nvcc", "cmake", "ninja", "make", "ld")
    for folder in (Path("/usr/bin"), Path("/bin"), Path("/usr/sbin"), Path("/sbin")):
        for program in folder.iterdir():
            name, link = program.name, programs / program.name
            compiles = any(name == one or name.startswith(f"{one}-") for one in compilers) or name.endswith(
                ("-gcc", "-g++")
            )
            if not compiles and not link.exists():
                link.symlink_to(program)
    return f"{venv / 'bin'}:{programs}"


if __name__ == "__main__":
    sys.exit(main())
