"""A machine whose address changes in the middle of a round keeps its samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan import test_routes as routes
from tests.wan.test_routes import ROOT

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

TOPOLOGY = """
hosts = ["a", "b", "c"]
[[paths]]
rtt_ms = 20
rate_mbps = 24
"""
BACK_S = 5.0
SLACK_S = 3.0  # for a machine that is busy

# Trains until it is told to end. Tells of every epoch: how many contributed, and what is lost of its own.
TRAIN = """
import json, select, sys, time, torch
from p2pavg import CollaborativeOptimizer

own = {"counted": 0, "averaged": 0, "discarded": 0}

def told(report):
    own["averaged"] += report.local_samples
    own["discarded"] += report.samples_discarded
    contributors = sum(member.samples > 0 for member in report.members)
    line = {"epoch": report.epoch, "peers": contributors, "discarded": report.samples_discarded}
    print(json.dumps({**line, "seconds": report.seconds_total, "at": time.time()}), flush=True)

torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024)
opt = CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.001), "moves", 96, 4, initial_peers=sys.argv[1:], on_round=told
)
print(json.dumps({"address": opt.peer.address}), flush=True)
while not select.select([sys.stdin], [], [], 0.2)[0]:  # an accelerator computes
    model(torch.randn(4, 1024)).square().mean().backward()
    opt.step()
    own["counted"] += 4
    opt.zero_grad()
opt.close()
print(json.dumps(own), flush=True)
"""


class Trainer:
    """One peer on a host, and what it prints."""

    def __init__(self, lab: Lab, host: str, *initial_peers: str) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self.process = lab.spawn(
            host, [sys.executable, "-c", TRAIN, *initial_peers], text=True, env=env, **pipes
        )
        self._lines: Queue[dict[str, Any]] = Queue()
        Thread(target=self._read, daemon=True).start()
        while "address" not in (told := self.next()):
            pass
        self.address: str = told["address"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def next(self) -> dict[str, Any]:
        """The next line that it prints."""
        return self._lines.get(timeout=90)

    def until(self, peers: int, since: float = 0.0) -> list[dict[str, Any]]:
        """All epochs to the first that ends after `since` and to which so many contributed."""
        lines = [self.next()]
        while lines[-1].get("peers") != peers or lines[-1]["at"] < since:
            lines.append(self.next())
        return lines

    def end(self) -> dict[str, Any]:
        """Have it leave; returns what became of its samples."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        while "counted" not in (told := self.next()):
            pass
        self.process.wait(60)
        return told


def test_an_address_that_changes_in_the_middle_of_a_round_costs_no_sample() -> None:
    """The peer is back within five seconds, with what it had counted: nobody discards anything."""
    with Lab(parse(TOPOLOGY, "moves")) as lab:
        one = Trainer(lab, "a")
        moved = Trainer(lab, "b", one.address)
        two = Trainer(lab, "c", one.address)
        moved.until(3)
        last = moved.next()  # an epoch that everybody was in from its beginning
        transfer = 2 * 2 / 3 * (1024 * 1025) * 2 * 8 / 24e6  # seconds: float16, contributions and results
        time.sleep(max(0.0, last["at"] + last["seconds"] - transfer / 2 - time.time()))
        at = time.time()
        lab.set_address("b", "10.77.0.200")
        told = moved.until(3, since=at + 0.5)
        back = next(line for line in told if line["peers"] > 1 and line["at"] > at)
        assert back["at"] - at < BACK_S + last["seconds"] + SLACK_S
        assert not any(line["discarded"] for line in told)
        for trainer in (one, two):
            assert not any(line["discarded"] for line in trainer.until(3, since=back["at"]))
        own = moved.end()
        assert own["discarded"] == 0
        one.process.kill()
        two.process.kill()


NETWORKS = """
hosts = ["cloud", "laptop", "home"]
[[nodes]]
hosts = "home"
behind_nat = true
[[paths]]
rtt_ms = 20
"""
AGAIN_S = 14.0  # five seconds, and a try that comes late; what a peer says of itself lasts for fifteen


def is_client_only(lab: Lab, way_in: str, address: str) -> bool:
    """What the peer at an address says of itself in the table."""
    table = [sys.executable, "-m", "p2pavg", "peers", "routes", "--initial-peers", way_in, "--json", "-"]
    printed = lab.run("cloud", ["env", f"PYTHONPATH={ROOT}", *table], timeout=60)
    found = [peer for peer in json.loads(printed)["peers"] if peer["addresses"][0].startswith(f"{address}:")]
    assert len(found) == 1, printed
    return bool(found[0]["client_only"])


def test_a_peer_that_moves_behind_a_nat_and_back_trains_on(tmp_path: Path) -> None:
    """From a network that lets others in, where a peer behind a NAT dialled it, to one that does not: the two
    meet by the help of a third, and train on together; the table tells how it is reached, there and back.
    """
    with Lab(parse(NETWORKS, "indoors")) as lab:
        key = ["--identity", str(tmp_path / "helper.key")]
        helper = lab.spawn(
            "cloud",
            [sys.executable, "-m", "p2pavg", "bootstrap", "--run", "routes", *key],
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert helper.stdout is not None
        way_in = helper.stdout.readline().strip()
        laptop = routes.Trainer(lab, "laptop", way_in)
        home = routes.Trainer(lab, "home", way_in)
        home.until(2)
        for address, indoors in (("10.77.0.200", True), ("10.77.0.201", False)):
            lab.set_node("laptop", behind_nat=indoors)
            lab.set_address("laptop", address)
            at = time.time()
            again = home.until(2, since=at + 1.5)
            assert again["at"] - at < AGAIN_S
            laptop.until(2, since=again["at"])
            deadline = time.monotonic() + 30
            while is_client_only(lab, way_in, address) is not indoors:
                assert time.monotonic() < deadline, "".join(laptop.logged)
        for process in (helper, laptop.process, home.process):
            process.kill()
