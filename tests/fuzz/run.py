"""Fuzz every target for a while: `python -m tests.fuzz.run [--seconds 60] [TARGET ...]`.

Parsers in Python run under atheris, the pump's under libFuzzer and AddressSanitizer, each in its own process
with a memory limit, from `corpus/TARGET` and the target's seeds. Without atheris or clang the targets that
need them are left out, and that is said. Exits with 1 when a target crashed, hung or grew too large.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
PUMP = "pump"
LIMITS = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=70000"]


def python_target(name: str, corpus: Path, seconds: int) -> list[str]:
    """The command that fuzzes one parser."""
    for number, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", *LIMITS, f"-artifact_prefix={corpus}/", str(corpus)]
    return [sys.executable, "-m", "tests.fuzz.run_atheris", name, *options]


def pump_target(corpus: Path, seconds: int, build: Path) -> list[str]:
    """The command that fuzzes the pump's streams, which it builds first."""
    source = ROOT / "csrc" / "pump" / "tests"
    configure = ["-DP2PAVG_SANITIZE=address", "-DCMAKE_CXX_COMPILER=clang++"]
    subprocess.run(["cmake", "-S", source, "-B", build, *configure], check=True, stdout=subprocess.DEVNULL)
    make = ["cmake", "--build", build, "--target", "fuzz_stream"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    options = [f"-max_total_time={seconds}", *LIMITS, f"-artifact_prefix={corpus}/", str(corpus)]
    return [str(build / "fuzz_stream"), *options]


def fuzz(name: str, seconds: int, build: Path) -> bool:
    """Run one target; whether it held."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder)
        for kept in sorted((CORPUS / name).glob("*")):
            shutil.copy(kept, corpus)
        command = (
            pump_target(corpus, seconds, build) if name == PUMP else python_target(name, corpus, seconds)
        )
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        ran = re.search(r"Done (\d+) in", done.stderr)
        inputs = f", {int(ran[1]):,} inputs" if ran else ""
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}{inputs}", flush=True)
        if done.returncode:
            print("\n".join(done.stderr.splitlines()[-40:]), flush=True)
            for found in corpus.glob("*-*"):
                if found.name.startswith(("crash", "timeout", "oom")):
                    print(f"{found.name}: {found.read_bytes()[:400].hex()}")
        return done.returncode == 0


def main() -> int:
    """All targets, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join([*TARGETS, PUMP])}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; default: %(default)s")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz", help="where the pump is built")
    args = parser.parse_args()
    held = True
    for name in args.targets or [*TARGETS, PUMP]:
        tool = shutil.which("clang++") if name == PUMP else importlib.util.find_spec("atheris")
        if tool is None:
            print(f"{name}: left out, {'clang' if name == PUMP else 'atheris'} is not installed")
        else:
            held = fuzz(name, args.seconds, args.build) and held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
