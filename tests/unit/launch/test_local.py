"""Processes of this machine as peers: how they end is said, and told by the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pavg import cli
from p2pavg.launch import local
from p2pavg.launch.local import Local
from p2pavg.printable import ending

ONE_IS_KILLED = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "first").mkdir()
except FileExistsError:
    end = time.monotonic() + 30
    while not (folder / "said").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
else:
    print("my last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = "print('ready'); import time; time.sleep(60)"


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs a program as two peers, without a bootstrap node; the exit code, and what was said."""
    monkeypatch.setattr(
        local,
        "_bootstrap",
        lambda: (subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.DEVNULL), "127.0.0.1:1"),
    )

    def launch(program: str, react: Callable[[str], None]) -> tuple[int, list[str]]:
        said: list[str] = []

        class Heard(Local):
            def _say(self, text: str, before: str = "", *_: Any) -> None:
                said.append(before + text)
                react(text)

        script = tmp_path / "peer.py"
        script.write_text(program)
        return Heard(script, [str(tmp_path)], 2).run(), said

    return launch


def test_a_peer_that_is_killed_is_told_of_at_once(
    launched: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    """The other peer goes on until it was said, after the last words of the one that was killed."""

    def react(text: str) -> None:
        if "was killed (SIGKILL)" in text:
            (tmp_path / "said").touch()

    code, said = launched(ONE_IS_KILLED, react)
    assert code == 128 + signal.SIGKILL
    words, end = (next(line for line in said if part in line) for part in ("last words", "was killed"))
    assert said.index(words) < said.index(end)
    assert words[:3] == end[:3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_swarm_that_was_stopped_did_not_end_by_itself(
    launched: Callable[..., tuple[int, list[str]]], number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM let all leave, and the exit code is the shell's for them."""
    ready: list[str] = []

    def react(text: str) -> None:
        if text == "ready":
            ready.append(text)
            if len(ready) == 2:
                os.kill(os.getpid(), number)

    code, said = launched(WAITS, react)
    assert code == 128 + number
    assert not [line for line in said if "ended" in line or "killed" in line]


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-11, "was killed (SIGSEGV)"), (-63, "was killed (signal 63)")],
)
def test_an_end_in_words(code: int, words: str) -> None:
    """Signals are called by their names."""
    assert ending(code) == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "local", "--swarm", "no.toml"], "--swarm is for --to ssh and --to docker and --to sky"),
        (["--peers", "3", "--swarm", "no.toml"], "--peers is for --to local, and this is --to ssh"),
        (["--emit", "folder", "--to", "ssh"], "--emit is for --to docker and --to sky, and this is --to ssh"),
        (["--follow"], "--follow is for 'launch logs'"),
    ],
)
def test_an_option_of_another_way_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would have no effect is not ignored."""
    (tmp_path / "peer.py").touch()
    assert cli.main(["launch", str(tmp_path / "peer.py"), *words]) == 1
    assert said in capsys.readouterr().err
