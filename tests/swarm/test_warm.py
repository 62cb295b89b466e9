"""Programs that are forked from a warm interpreter are what the system would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.warm.popen import Cold, Warm

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")

TOLD = """
import os, sys, torch, p2pavg
print(sys.argv, sys.path[:2], __name__, os.getcwd(), os.environ["TOLD"], os.getppid(), os.getpgrp())
print(sys.stdin.read(), file=sys.stderr)
open(sys.argv[1], "a").close()
raise SystemExit(3)
"""


def both(*words: str, cwd: Path | None = None) -> tuple[Any, ...]:
    """What a program said and how it ended, when forked; as when started by the system."""
    ends: list[Any] = []
    for start in (Warm, Cold):
        process = start(
            [sys.executable, *words],
            cwd=cwd or ROOT,
            env=os.environ | {"TOLD": "told", "PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = process.communicate("asked", timeout=100)
        ends.append((process.returncode, out, err.splitlines()[-1:]))
    assert ends[0] == ends[1]
    found: tuple[Any, ...] = ends[0]
    return found


def test_code_a_module_and_a_file_run_as_if_started(tmp_path: Path) -> None:
    """Arguments, path, folder, parent, group, streams and exit code are those of `python`."""
    code, out, err = both("-c", TOLD, "file", cwd=tmp_path)
    assert (code, err) == (3, ["asked"])
    assert f"{tmp_path} told {os.getpid()} " in out
    assert both("-m", "p2pavg", "peers")[0] == 2
    assert both("examples/train_lm.py", "--help")[0] == 0


def test_errors_and_signals_end_it_as_ever() -> None:
    """A traceback's last line, Ctrl-C and SIGKILL are told as by any child."""
    assert both("-c", "import p2pavg\nraise ValueError(1)")[::2] == (1, ["ValueError: 1"])
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        code = f"import os, time, p2pavg\nos.kill(os.getpid(), {int(number)})\ntime.sleep(100)"
        assert both("-c", code)[0] == -number


@pytest.mark.parametrize("at_once", ["", "1"])
def test_what_is_printed_waits_as_ever(at_once: str) -> None:
    """Of a killed program only what it printed with PYTHONUNBUFFERED is there."""
    code = "import os, p2pavg\nprint('said')\nos.kill(os.getpid(), 9)"
    env = os.environ | {"PYTHONUNBUFFERED": at_once}
    for start in (Warm, Cold):
        process = start([sys.executable, "-c", code], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.communicate()[0] == ("said\n" if at_once else "")


def test_two_in_turn_order_their_sets_otherwise() -> None:
    """What would differ from peer to peer by the order of a set is not hidden: hashes differ."""
    code = "import p2pavg\nprint(hash('p2pavg'))"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    said = [Warm([sys.executable, "-c", code], **pipes).communicate()[0] for _ in range(2)]
    assert len(set(said)) == 2


def test_what_is_read_at_the_start_starts_anew() -> None:
    """A program with other variables for the interpreter or its libraries is not forked."""
    code = "import sys, p2pavg\nprint('torch' in sys.modules)"
    for more, warm in (({}, True), ({"OMP_NUM_THREADS": "2"}, False), ({"P2PAVG_NATIVE": "0"}, False)):
        process = Warm(
            [sys.executable, "-c", code], env=os.environ | more, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.communicate()[0] == f"{warm}\n"
