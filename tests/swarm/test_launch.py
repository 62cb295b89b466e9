"""p2pavg launch: a script becomes a swarm on this machine with one command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.swarm

SCRIPT = """
import sys, time
import torch
from p2pavg import CollaborativeOptimizer
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with CollaborativeOptimizer(optimizer, "launched", 48, 4, listen="127.0.0.1:0") as opt:
    print("address", opt.peer.address)
    most = 0
    while opt.epoch < int(sys.argv[1]):
        time.sleep(0.02)
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step()
        most = max(most, len(opt.last_report.members) if opt.last_report else 0)
    print("trained with", most)
"""


def launch(tmp_path: Path, peers: int, *arguments: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "p2pavg", "launch", str(script), "--peers", str(peers), "--", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(180)
def test_a_script_becomes_a_swarm(tmp_path: Path) -> None:
    """Three peers train from the first epoch on, though the run is shorter than joining; each line names its
    peer; the exit code is theirs.
    """
    process = launch(tmp_path, 3, "5")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert set(re.findall(r"^\[(\d)\] trained with 3$", out, re.M)) == {"1", "2", "3"}, out


@pytest.mark.timeout(180)
def test_a_signal_lets_all_leave(tmp_path: Path) -> None:
    """SIGTERM, as Ctrl-C, lets every peer leave; no process stays."""
    process = launch(tmp_path, 2, "1000000")
    assert process.stdout is not None
    seen: set[str] = set()
    for line in process.stdout:
        seen |= set(re.findall(r"^\[(\d)\] address", line))
        if len(seen) == 2:
            break
    started = children(process.pid)
    assert len(started) == 3  # a bootstrap node, too
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_script_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """Exit code 1 and a line."""
    command = [sys.executable, "-m", "p2pavg", "launch", str(tmp_path / "no.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("p2pavg launch: there is no script")
