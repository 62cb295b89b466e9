"""A trainer behind a home router that maps ports: others reach it, and the mapping ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.test_routes import ROOT

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

TOPOLOGY = """
hosts = ["cloud", "desk", "laptop"]
[gateways.home]
hosts = ["desk", "laptop"]
nat = "independent/port"
port_mapping = true
[[paths]]
rtt_ms = 20
"""

# Trains until its input ends; then closes. Says how long it took from the opened ports to the mapped one.
TRAIN = """
import json, pathlib, select, sys, time, torch
from p2pavg import CollaborativeOptimizer
from p2pavg.membership.reach import gateway
from p2pavg.peer.mapping import Mapping

# The default route of the lab's hosts names a device alone; that of a home names its router.
pathlib.Path(sys.argv[1]).write_text("head\\nwan0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\\n")
gateway._ROUTES = pathlib.Path(sys.argv[1])
took = {}
start, mapped = Mapping.start, Mapping.settled

def started(self):
    took["began"] = time.monotonic()
    start(self)

async def settled(self):
    await mapped(self)
    took.setdefault("s", time.monotonic() - took["began"])

Mapping.start, Mapping.settled = started, settled
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
with CollaborativeOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), "mapped", 64, 4, initial_peers=sys.argv[2:], map_port=True
) as opt:
    print(json.dumps({"address": opt.peer.address, "s": took.get("s")}), flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        model(torch.randn(4, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    print(json.dumps([link.address[0] for link in opt.peer._runtime.links.values()]), flush=True)
"""


def train(
    lab: Lab, routes: Path, host: str, *initial_peers: str
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    code = TRAIN if host != "cloud" else TRAIN.replace("map_port=True", "map_port=False")
    process = lab.spawn(
        host, [sys.executable, "-c", code, str(routes / host), *initial_peers], text=True, env=env, **pipes
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def leased(lab: Lab) -> set[int]:
    return {mapped.outside_port for mapped in lab.mappings("home") if mapped.leased}


def test_mapped_trainers_are_reached_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Two machines behind one router get a port each within a second, at the router's address, and are no
    clients; they dial each other inside; both ports are gone after close() and after SIGTERM.
    """
    with Lab(parse(TOPOLOGY, "mapped")) as lab:
        cloud, way_in = train(lab, tmp_path, "cloud")
        desk, first = train(lab, tmp_path, "desk", way_in["address"])
        laptop, second = train(lab, tmp_path, "laptop", way_in["address"])
        outside = lab.outside("home")
        ports = {told["address"].rpartition(":") for told in (first, second)}
        assert {host for host, _, _ in ports} == {outside}
        assert {int(port) for _, _, port in ports} == leased(lab)
        assert len(leased(lab)) == 2
        assert max(first["s"], second["s"]) <= 1.0
        table = [sys.executable, "-m", "p2pavg", "peers", "mapped", "--initial-peers", way_in["address"]]
        deadline = time.monotonic() + 60
        while True:
            printed = lab.run("cloud", ["env", f"PYTHONPATH={ROOT}", *table, "--json", "-"], timeout=60)
            peers = json.loads(printed)["peers"]
            if len(peers) == 3:
                break
            assert time.monotonic() < deadline, printed
        assert not any(peer["client_only"] for peer in peers)
        assert desk.stdin is not None
        desk.stdin.close()
        assert desk.wait(30) == 0
        assert desk.stdout is not None
        seen = json.loads(desk.stdout.readline())
        assert sorted(seen) == sorted([lab.address("cloud"), lab.address("laptop")])
        assert leased(lab) == {int(second["address"].rpartition(":")[2])}
        laptop.send_signal(signal.SIGTERM)
        laptop.wait(30)
        assert leased(lab) == set()
        cloud.kill()
