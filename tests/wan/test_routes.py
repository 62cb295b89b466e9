"""Routes that are missing, and addresses that change, under training peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TOPOLOGY = """
hosts = ["a", "b", "c"]
[[paths]]
rtt_ms = 20
"""

# Trains for ever, and tells of every epoch how many peers contributed to it.
TRAIN = """
import json, sys, time, torch
from p2pavg import CollaborativeOptimizer

def told(report):
    contributors = sum(member.samples > 0 for member in report.members)
    print(json.dumps({"epoch": report.epoch, "peers": contributors, "at": time.time()}), flush=True)

torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), "routes", 96, 4, initial_peers=sys.argv[1:], on_round=told
) as opt:
    print(json.dumps({"address": opt.peer.address, "epoch": opt.epoch, "at": time.time()}), flush=True)
    while True:
        time.sleep(0.01)  # an accelerator computes
        model(torch.randn(4, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad()
"""


class Trainer:
    """One peer on a host; what it printed, and what it logged."""

    def __init__(self, lab: Lab, host: str, *initial_peers: str) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        argv = [sys.executable, "-c", TRAIN, *initial_peers]
        self.process = lab.spawn(host, argv, text=True, env=env, **pipes)
        self.logged: list[str] = []
        self._logging = Thread(target=self._read_log, daemon=True)
        self._logging.start()
        while "address" not in (told := self.next()):
            pass  # an epoch that ended while it joined
        self.start = told

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.logged += iter(self.process.stderr)

    def next(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "".join(self.logged)
        told: dict[str, Any] = json.loads(line)
        return told

    def until(self, peers: int, since: float = 0.0) -> dict[str, Any]:
        """The first epoch that ends after `since` and to which so many contributed."""
        while (told := self.next()).get("peers") != peers or told["at"] < since:
            pass
        return told


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(parse(TOPOLOGY, "routes")) as lab:
        yield lab


def test_two_that_cannot_reach_each_other_average_with_a_third(lab: Lab) -> None:
    """No route between two of three peers: all three contribute within two epochs of their being there, at
    the pace of three.
    """
    lab.set("a", "b", both=True, down=True)
    one = Trainer(lab, "a")
    between = Trainer(lab, "c", one.start["address"])
    one.until(2)
    other = Trainer(lab, "b", between.start["address"])
    first = other.until(3)
    assert first["epoch"] <= other.start["epoch"] + 2
    told = [other.next() for _ in range(20)]
    assert [each["peers"] for each in told] == [3] * 20
    assert told[-1]["at"] - told[0]["at"] < 20 * 3 * 0.1  # an epoch of three peers takes about 0.1 s


def test_an_address_that_changes_costs_seconds(lab: Lab) -> None:
    """The host of the peer that others joined gets another address in the middle of a run: it says so, and is
    in the average again within five seconds (three more here, for a machine that is busy).
    """
    moved = Trainer(lab, "a")
    stays = Trainer(lab, "b", moved.start["address"])
    moved.until(2)
    old = lab.address("a")
    at = time.time()
    lab.set_address("a", "10.77.0.200")
    again = stays.until(2, since=at + 0.8)  # rounds of a tenth of a second end until the links are silent
    assert again["at"] - at < 5.0 + 3.0
    moved.until(2, since=again["at"])
    said = f"this machine's address has changed from {old} to 10.77.0.200"
    deadline = time.monotonic() + 30
    while not any(said in line for line in moved.logged):
        assert time.monotonic() < deadline, "".join(moved.logged)
        time.sleep(0.05)
