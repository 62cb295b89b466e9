"""The keeper of a peer on its machine, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pavg.launch import keeper as module
from p2pavg.launch.keeper import Keeper

DEADLINE_S = 60.0


def folder(tmp_path: Path, code: str) -> Path:
    """Of a peer that is this Python program."""
    job = {"arguments": ["-c", code], "environment": {"SAID": "hello"}}
    (tmp_path / "code").mkdir()
    (tmp_path / "peer.json").write_text(json.dumps(job))
    return tmp_path


def keeper(at: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "p2pavg.launch.keeper", str(at)])


def state(at: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((at / "state.json").read_text()))
    except OSError:
        return {}


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_peer_that_ends_is_not_started_again(tmp_path: Path) -> None:
    """Its output and its environment are its own; the state tells that it ended."""
    at = folder(tmp_path, "import os; print(os.environ['SAID'])")
    assert Keeper(at).run() == 0
    assert (at / "peer.log").read_text() == "hello\n"
    told = state(at)
    assert (told["state"], told["exit_code"], told["restarts"]) == ("ended", 0, 0)


def test_a_peer_that_crashes_is_started_again_until_it_crashed_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start is in the log; the keeper gives up with the peer's exit code."""
    monkeypatch.setattr(module, "PAUSES_S", (0.0,))
    monkeypatch.setattr(module, "MOST_CRASHES", 3)
    at = folder(tmp_path, "import sys; print('up'); sys.exit(7)")
    assert Keeper(at).run() == 7
    assert (at / "peer.log").read_text() == "up\n" * 3
    told = state(at)
    assert (told["state"], told["exit_code"], told["restarts"]) == ("failed", 7, 2)


def test_sigterm_lets_the_peer_leave(tmp_path: Path) -> None:
    """The peer gets SIGTERM once, its last words are kept, and nothing is started afterwards."""
    code = (
        "import signal, sys, time\n"
        "def leave(*_):\n    print('bye', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    at = folder(tmp_path, code)
    process = keeper(at)
    until(lambda: (at / "peer.log").exists() and "up\n" in (at / "peer.log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert (at / "peer.log").read_text() == "up\nbye\n"
    assert state(at)["state"] == "left"


def test_a_peer_whose_child_holds_its_output_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that outlives a crash, and keeps the log open, does not pass for the peer."""
    monkeypatch.setattr(module, "PAUSES_S", (0.0,))
    monkeypatch.setattr(module, "MOST_CRASHES", 2)
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('up', flush=True); sys.exit(3)"
    at = folder(tmp_path, code)
    assert Keeper(at).run() == 3
    assert (at / "peer.log").read_text() == "up\n" * 2


def test_two_keepers_of_one_folder(tmp_path: Path) -> None:
    """The second one ends at once, and the first one's peer lives."""
    at = folder(tmp_path, "import time; time.sleep(600)")
    first = keeper(at)
    until(lambda: state(at).get("state") == "running")
    assert keeper(at).wait(DEADLINE_S) == 75
    os.kill(state(at)["peer"], 0)
    first.send_signal(signal.SIGTERM)
    first.wait(DEADLINE_S)


def test_a_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full log becomes peer.log.1, and the one before that goes."""
    monkeypatch.setattr(module, "LOG_BYTES", 1000)
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    at = folder(tmp_path, "for n in range(400): print(f'{n:09}', flush=True)")
    Keeper(at).run()
    sizes = {path.name: path.stat().st_size for path in at.glob("peer.log*")}
    assert set(sizes) <= {"peer.log", "peer.log.1"}
    assert sum(sizes.values()) <= 2000


def test_a_peer_that_left_by_itself_is_started_again_after_the_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud's notice ends a peer with 143: it is away for longer than the notice; started anew, it does not
    wait for those who began with it.
    """
    paused: list[float] = []
    monkeypatch.setattr(module, "TAKEN_S", 0.0)
    program = (
        "import os, sys\n"
        "print(os.environ.get('P2PAVG_PEERS'))\n"
        "sys.exit(0 if os.path.exists('once') else open('once', 'w').close() or 143)"
    )
    at = folder(tmp_path, program)
    job = json.loads((at / "peer.json").read_text())
    job["environment"]["P2PAVG_PEERS"] = "3"
    (at / "peer.json").write_text(json.dumps(job))
    made = Keeper(at)
    told = made._tell

    def tell(state: str, code: int | None) -> None:
        paused.extend([1.0] if state == "away" else [])
        told(state, code)

    monkeypatch.setattr(made, "_tell", tell)
    assert made.run() == 0
    assert paused
    assert (at / "peer.log").read_text() == "3\nNone\n"


@pytest.mark.parametrize("before", ["ended", "left", "failed"])
def test_a_peer_that_is_through_is_not_started_by_the_machine(tmp_path: Path, before: str) -> None:
    """A unit starts keepers with the machine; what ended, left or gave up stays so until launched anew."""
    at = folder(tmp_path, "print('up')")
    (at / "state.json").write_text(json.dumps({"state": before}))
    assert keeper(at).wait(DEADLINE_S) == 0
    assert not (at / "peer.log").exists()
    assert state(at) == {"state": before}


def test_a_keeper_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    """The peer is started again, which counts, and does not wait for those who began with it."""
    at = folder(tmp_path, "import os; print(os.environ.get('P2PAVG_PEERS'))")
    job = json.loads((at / "peer.json").read_text())
    job["environment"]["P2PAVG_PEERS"] = "3"
    (at / "peer.json").write_text(json.dumps(job))
    (at / "state.json").write_text(json.dumps({"state": "running", "restarts": 2}))
    assert keeper(at).wait(DEADLINE_S) == 0
    assert (at / "peer.log").read_text() == "None\n"
    assert state(at)["restarts"] == 3
