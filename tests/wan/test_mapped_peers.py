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

# The default route of the lab's hosts names a device alone; that of a home names its router.
ROUTED = """
import pathlib, sys
from p2pavg.membership.reach import gateway

gateway._ROUTES = pathlib.Path(sys.argv.pop(1))
gateway._ROUTES.write_text("head\\nwan0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\\n")
"""

# The command line.
COMMAND = (
    ROUTED
    + """
from p2pavg.cli import main
sys.exit(main(sys.argv[1:]))
"""
)

# A peer without an optimizer.
PEER = (
    ROUTED
    + """
import time
from p2pavg import Peer

peer = Peer("mapped", initial_peers=sys.argv[1:], map_port=True).start()
while peer._runtime.dht.mapped is None:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(100)
"""
)

# Trains until its input ends; then closes. Says how long it took from the opened ports to the mapped one.
TRAIN = (
    ROUTED
    + """
import json, select, time, torch
from p2pavg import CollaborativeOptimizer
from p2pavg.peer.mapping import Mapping

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
    torch.optim.SGD(model.parameters(), lr=0.01), "mapped", 64, 4, initial_peers=sys.argv[1:], map_port=True
) as opt:
    print(json.dumps({"address": opt.peer.address, "s": took.get("s")}), flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        model(torch.randn(4, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    print(json.dumps([link.address[0] for link in opt.peer._runtime.links.values()]), flush=True)
"""
)


def train(
    lab: Lab, routes: Path, host: str, *initial_peers: str
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    code = TRAIN if host != "cloud" else TRAIN.replace("map_port=True", "map_port=False")
    process = spawn(lab, routes, host, code, *initial_peers)
    return process, json.loads(first_line(process))


def spawn(lab: Lab, routes: Path, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    return lab.spawn(
        host, [sys.executable, "-c", code, str(routes / host), *arguments], text=True, env=env, **pipes
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def leased(lab: Lab) -> set[int]:
    return {mapped.outside_port for mapped in lab.mappings("home") if mapped.leased}


def test_mapped_trainers_are_reached_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Two machines behind one router get a port each within a second, at the router's address, and are no
    clients; they dial each other inside; both ports are gone after close() and after SIGTERM.
    """
    # With a hairpin the way outside would do as well, when the machine is busy.
    with Lab(parse(TOPOLOGY.replace("= true", "= true\nhairpin = false"), "mapped")) as lab:
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


def test_commands_use_the_gateway_and_leave_nothing_behind(tmp_path: Path) -> None:
    """`p2pavg reach` finds that others get through to a port that the gateway leads to it, and gives it back.
    A bootstrap node, and a peer without an optimizer, give theirs back after SIGTERM.
    """
    with Lab(parse(TOPOLOGY.replace("= true", '= "pmp"'), "orders")) as lab:
        key = ["--identity", str(tmp_path / "key")]
        cloud = spawn(lab, tmp_path, "cloud", COMMAND, "bootstrap", *key)
        way_in = first_line(cloud).strip()
        reach = spawn(lab, tmp_path, "desk", COMMAND, "reach", way_in, "--json", "-")
        found = json.loads(reach.communicate(timeout=60)[0])
        assert found["reach"] == "mapped", found
        assert found["addresses"][0].startswith(f"{lab.outside('home')}:")
        assert leased(lab) == set()
        helps = ["bootstrap", "--run", "mapped", "--map-port", "--initial-peers", way_in]
        helper = spawn(lab, tmp_path, "laptop", COMMAND, *helps, "--identity", str(tmp_path / "laptop.key"))
        host, _, port = first_line(helper).strip().rpartition(":")
        assert (host, {int(port)}) == (lab.outside("home"), leased(lab))
        peer = spawn(lab, tmp_path, "desk", PEER, way_in)
        assert first_line(peer) == "ready\n"
        assert len(leased(lab)) == 2
        for process, code in ((helper, 0), (peer, 143)):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == code
        assert leased(lab) == set()
        cloud.kill()
