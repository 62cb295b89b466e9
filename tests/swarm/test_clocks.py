"""Wall clocks that are wrong by hours, or jump by a day: nothing that decides looks at them."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from p2pavg.credentials import Authority

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
HOUR, DAY = 3600.0, 86400.0
PEERS = 3

TRAIN = """
import json, sys, time, torch
from p2pavg import CollaborativeOptimizer

def told(report):
    facts = {"peers": len(report.members), "discarded": report.samples_discarded, "attempts": report.attempts}
    print(json.dumps(facts | {"clock": time.time()}), flush=True)

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), "clocks", 96, 4, listen="127.0.0.1:0",
    initial_peers=sys.argv[1:], on_round=told,
) as opt:
    print(json.dumps({"address": opt.peer.address}), flush=True)
    while True:
        time.sleep(0.01)  # an accelerator computes
        model(torch.randn(4, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes the wall clock of a process wrong."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no compiler makes the library that moves the clock")
    built = tmp_path_factory.mktemp("clock") / "clock.so"
    source = str(Path(__file__).with_name("clock.c"))
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(built), source, "-ldl"], check=True)
    return built


class Peer:
    """A trainer whose wall clock is off by so many seconds, until it is `moved`."""

    def __init__(self, stack: ExitStack, folder: Path, shim: Path, offset: float, way_in: str | None) -> None:
        self._clock = folder / "clock"
        self.moved(offset)
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(shim),
            "WRONG_CLOCK": str(self._clock),
        }
        if (folder / "credentials").exists():
            env["P2PAVG_CREDENTIALS"] = str(folder / "credentials")
        self.log = folder / "log"
        argv = [sys.executable, "-c", TRAIN, *([way_in] if way_in else [])]
        with open(self.log, "w") as errors:
            process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._process = stack.enter_context(process)
        stack.callback(process.kill)
        self.address: str = self.until("address")["address"]

    def moved(self, offset: float) -> None:
        """From now on its clock is off by that."""
        if not self._clock.exists():
            self._clock.write_bytes(struct.pack("d", offset))
        with open(self._clock, "r+b") as file:  # in place: the process has it mapped
            file.write(struct.pack("d", offset))

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)
        raise AssertionError(self.log.read_text())

    def until(self, key: str, wanted: object = None) -> dict[str, Any]:
        """The next line that has this."""
        return next(line for line in self.lines() if key in line and wanted in (None, line[key]))


@pytest.mark.parametrize("closed", [pytest.param(False, marks=pytest.mark.long), True])
def test_wrong_clocks_disturb_nothing(tmp_path: Path, shim: Path, closed: bool) -> None:
    """Clocks at +5 h and −5 h, and one that jumps a day ahead and then a day back: all train in every epoch,
    nothing is discarded, no attempt fails for it, and nobody logs more than that the run is open.
    """
    authority = Authority.new("clocks") if closed else None
    with ExitStack() as stack:
        peers: list[Peer] = []
        for number, offset in enumerate((5 * HOUR, -5 * HOUR, 0.0)):
            folder = tmp_path / str(number)
            folder.mkdir()
            if authority is not None:
                (folder / "credentials").touch(mode=0o600)
                (folder / "credentials").write_text(authority.member().to_text())
            peers.append(Peer(stack, folder, shim, offset, peers[0].address if peers else None))
        jumper = peers[2]
        for offset in (DAY, -DAY / 2, 0.0):
            jumper.until("peers", PEERS)
            jumper.moved(offset)
            after = (line for line in jumper.lines() if abs(line["clock"] - time.time() - offset) < HOUR)
            told = [next(after) for _ in range(15)]
            seen = {(line["peers"], line["discarded"], line["attempts"]) for line in told}
            assert seen == {(PEERS, 0, 1)}
        for peer in peers:
            logged = [line for line in peer.log.read_text().splitlines() if "join" not in line]
            assert not [line for line in logged if "is open: whoever" not in line], logged
