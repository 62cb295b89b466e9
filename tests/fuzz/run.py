"""Fuzz every target for a while: `python -m tests.fuzz.run [--seconds 60 | --total 60] [TARGET ...]`.

Parsers in Python run under atheris, the pump's under libFuzzer and AddressSanitizer, each in its own process
with a memory limit, from `corpus/TARGET` and the target's seeds. Without atheris or clang, pytest runs those
targets from their seeds instead, and that is said. Exits with 1 when a target crashed, hung or grew too
large.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
PUMP = "pump"
LIMITS = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=70000"]
LOG = "log.txt"
GRACE_S = 10  # beyond --total, for what is still running


@dataclass(frozen=True)
class Fuzzed:
    """One target that is running."""

    name: str
    work: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        return Path(self.work.name)


def build_pump(build: Path) -> Path:
    """The program that fuzzes the pump's streams."""
    source = ROOT / "csrc" / "pump" / "tests"
    configure = ["-DP2PAVG_SANITIZE=address", "-DCMAKE_CXX_COMPILER=clang++"]
    subprocess.run(["cmake", "-S", source, "-B", build, *configure], check=True, stdout=subprocess.DEVNULL)
    make = ["cmake", "--build", build, "--target", "fuzz_stream"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return build / "fuzz_stream"


def child(name: str, folder: Path, seconds: int, build: Path) -> NoReturn:
    """In the target's own process: fuzz, never to return."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # libFuzzer wants it
    os.setsid()  # so that a compiler ends with its target
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    corpus = folder / "corpus"
    corpus.mkdir()
    for kept in sorted((CORPUS / name).glob("*")):
        shutil.copy(kept, corpus)
    options = [f"-max_total_time={seconds}", *LIMITS, f"-artifact_prefix={folder}/", str(corpus)]
    if name == PUMP:
        program = build_pump(build)
        os.execv(program, [str(program), *options])
    from tests.fuzz import run_atheris

    for number, seed in enumerate(run_atheris.TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    run_atheris.fuzz(name, options)


def start(name: str, seconds: int, build: Path) -> tuple[int, Fuzzed]:
    """(pid, target): a process of its own, which shares what was imported."""
    fuzzed = Fuzzed(name, tempfile.TemporaryDirectory())
    pid = os.fork()
    if pid == 0:
        try:
            child(name, fuzzed.folder, seconds, build)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid, fuzzed


def report(fuzzed: Fuzzed, code: int, *, cut: bool) -> bool:
    """Say how it went; whether it held. cut: this program ended it."""
    log = (fuzzed.folder / LOG).read_text(errors="replace")
    ran = re.search(r"Done (\d+) (?:in|runs)", log)
    inputs = f", {int(ran[1]):,} inputs" if ran else ""
    held = code == 0 or (cut and code == -signal.SIGKILL)
    word = "ok" if code == 0 else "cut off, this machine is too busy" if held else f"FAILED ({code})"
    print(f"{fuzzed.name}: {word}{inputs}", flush=True)
    if not held:
        print("\n".join(log.splitlines()[-40:]), flush=True)
        for found in fuzzed.folder.glob("*-*"):
            print(f"{found.name}: {found.read_bytes()[:400].hex()}")
    fuzzed.work.cleanup()
    return held


def run(names: list[str], seconds: int | None, total: int, processes: int, build: Path) -> bool:
    """Fuzz all of `names`, for `seconds` each or, when None, `total` together; whether all held."""
    waiting, running, held = deque(names), dict[int, Fuzzed](), True
    ends, late = time.monotonic() + total, set[int]()

    def cut(*_: object) -> None:
        for name in waiting:
            print(f"{name}: left out, this machine is too busy")
        waiting.clear()
        for pid in running:
            late.add(pid)
            os.killpg(pid, signal.SIGKILL)

    if seconds is None:
        signal.signal(signal.SIGALRM, cut)
        signal.alarm(total + GRACE_S)
    while waiting or running:
        while waiting and len(running) < processes:
            share = (ends - time.monotonic()) * processes / (len(waiting) + len(running))
            pid, fuzzed = start(waiting.popleft(), max(1, int(share)) if seconds is None else seconds, build)
            running[pid] = fuzzed
        pid, status = os.wait()
        held = report(running.pop(pid), os.waitstatus_to_exitcode(status), cut=pid in late) and held
    signal.alarm(0)
    return held


def from_seeds(tool: str, test: str) -> bool:
    """Without the tool: what pytest does with the seeds of the same targets."""
    print(f"{tool} is not installed: {test} runs from the seeds instead", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/fuzz/{test}"]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    """All targets, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; default: %(default)s")
    parser.add_argument("--total", type=int, help="seconds for all targets together, instead of --seconds")
    parser.add_argument("--processes", type=int, default=1, help="at a time; default: %(default)s")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz", help="where the pump is built")
    args = parser.parse_args()
    python, pump = importlib.util.find_spec("atheris") is not None, shutil.which("clang++") is not None
    if python:
        from tests.fuzz.run_atheris import TARGETS  # imported once, for all children
    else:
        from tests.fuzz.targets import TARGETS
    names = args.targets or [PUMP, *TARGETS]  # the pump first: it takes a while to build
    unknown = [name for name in names if name not in [PUMP, *TARGETS]]
    if unknown:
        parser.error(f"no target {unknown[0]}; there are {', '.join([PUMP, *TARGETS])}")
    held = True
    if not python and any(name != PUMP for name in names):
        held = from_seeds("atheris", "test_parsers.py")
    if not pump and PUMP in names:
        held = from_seeds("clang", "test_fuzz_engine.py") and held
    runnable = [name for name in names if (pump if name == PUMP else python)]
    seconds = None if args.total is not None else args.seconds
    return 0 if run(runnable, seconds, args.total or 0, args.processes, args.build) and held else 1


if __name__ == "__main__":
    sys.exit(main())
