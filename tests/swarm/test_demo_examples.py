from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Script:
    """Python as a person starts it in a terminal."""

    def __init__(self, *words: str) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def line_with(self, words: str) -> str:
        """Read on until a line contains `words`. The test's timeout bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line.strip()
        raise AssertionError(f"{words!r} never came:\n{''.join(self.lines)}")

    def end(self) -> str:
        """The rest of the output, of a script that must end well."""
        rest, _ = self.process.communicate()
        assert self.process.returncode == 0, "".join(self.lines) + rest
        return "".join(self.lines) + rest


@pytest.fixture
def start():
    """Starts Python with these words; whatever still runs at the end is killed."""
    scripts: list[Script] = []

    def start(*words: str) -> Script:
        scripts.append(Script(*words))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.process.poll() is None:
            script.process.kill()
            script.process.wait()


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LM = ("--listen", "127.0.0.1:0", "--target-batch-size", "64", "--epochs", "100", "--validation-windows", "64")


def test_the_printed_line_joins_the_run(start):
    """What train_lm.py prints can be pasted as it is; both peers end with equal parameters."""
    first = start("examples/train_lm.py", "--run-id", "by-hand", *LM)
    printed = shlex.split(first.line_with("--initial-peers"))
    assert printed[:2] == ["python", "examples/train_lm.py"]
    second = start("examples/train_lm.py", *printed[2:], *LM)
    first.line_with(" 2 peers")
    ends = [script.end().splitlines()[-1].split("parameters ")[1] for script in (first, second)]
    assert ends[0] == ends[1]


def test_digits_in_two_terminals(start):
    """The README's own example trains in two terminals and reads digits."""
    node = start("-m", "p2pavg", "bootstrap", "--listen", f"127.0.0.1:{free_port()}")
    address = node.line_with("127.0.0.1:")
    scripts = [start("examples/digits.py", "--epochs", "300", "--initial-peers", address) for _ in range(2)]
    for script in scripts:
        assert "--initial-peers" in script.line_with("join with")
        script.line_with(": 2 peers")
    for script in scripts:
        last = script.end().splitlines()[-1]
        assert float(last.split(": ")[1].split("%")[0]) > 85


def test_a_wrong_address_is_one_line(start):
    """A peer whose initial peer does not answer ends with one line that names the address."""
    script = start("examples/train_lm.py", "--initial-peers", "127.0.0.1:9", *LM)
    out, _ = script.process.communicate()
    assert script.process.returncode == 1
    assert out.startswith("train_lm: ")
    assert "127.0.0.1:9" in out
    assert len(out.strip().splitlines()) == 1


def test_own_text(start, tmp_path):
    """--text trains on one's own files, alone and without a network."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps. " * 20)
    words = ("--text", str(tmp_path), "--suffix", ".txt", "--target-batch-size", "32", "--epochs", "30")
    out = start("examples/train_lm.py", "--alone", *words).end()
    assert float(out.splitlines()[-1].split("validation loss ")[1].split(",")[0]) < 3.0
