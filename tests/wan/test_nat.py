"""Hosts behind an emulated NAT: what passes it, and how peers behind it train with the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.training import ROOT, lines, train

pytestmark = pytest.mark.wan

TOPOLOGY = """
hosts = ["a", "b", "home1", "home2"]
[[nodes]]
hosts = ["home1", "home2"]
behind_nat = true
[[paths]]
rtt_ms = 20
"""

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
    print("connected")
except TimeoutError:
    print("timed out")
"""

# Answers a datagram at once, from another port, and again after so many seconds of silence.
ANSWER = """
import socket, sys, time
here, elsewhere = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
here.bind(("", 5000))
print("ready", flush=True)
_, caller = here.recvfrom(64)
elsewhere.sendto(b"stranger", caller)
here.sendto(b"answer", caller)
time.sleep(float(sys.argv[1]))
here.sendto(b"late", caller)
"""

# Prints what comes back until nothing does for so many seconds.
CALL = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(float(sys.argv[2]))
sock.sendto(b"call", (sys.argv[1], 5000))
try:
    while True:
        print(sock.recv(64).decode())
except TimeoutError:
    pass
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(parse(TOPOLOGY, "nat")) as lab:
        yield lab


def test_nothing_gets_in_from_outside(lab: Lab, traffic: Callable[[Lab], Any]) -> None:
    """Datagrams to a host behind a NAT are lost, TCP connections to it time out; both are counted as cut."""
    hosts = traffic(lab)
    with hosts.server("home1", "echo", 5000), hosts.server("home1", "tcp-sink", 5000, 1, 0, 0):
        home = lab.address("home1")
        for outside in ("a", "home2"):
            answered = json.loads(lab.run(outside, hosts.argv("ping", home, 5000, 3, 300)))
            assert answered == {"rtts": [], "lost": 3}
            assert lab.run(outside, [sys.executable, "-c", CONNECT, home, "2"]) == "timed out\n"
            path = lab.stats().paths[outside, "home1"]
            assert path.cut_packets == path.sent_packets > 3
        lab.set_node("home1", behind_nat=False)
        assert lab.run("a", [sys.executable, "-c", CONNECT, home, "10"]) == "connected\n"


def test_everything_gets_out_and_the_answers_in(lab: Lab, traffic: Callable[[Lab], Any]) -> None:
    """From behind a NAT, datagrams are answered and TCP data arrive intact."""
    hosts = traffic(lab)
    outside = lab.address("a")
    with hosts.server("a", "echo", 5000), hosts.server("a", "tcp-sink", 5000, 2, 0, 0) as sink:
        answered = json.loads(lab.run("home1", hosts.argv("ping", outside, 5000, 5, 2000)))
        assert answered["lost"] == 0
        sent = json.loads(lab.run("home1", hosts.argv("tcp-send", outside, 5000, 2, 5)))
        assert sink.stdout is not None
        assert json.loads(sink.stdout.readline())["digests"] == sent["digests"]
    assert lab.stats().paths["a", "home1"].cut_packets == 0


def test_only_the_very_port_may_answer(lab: Lab) -> None:
    """An open flow lets in what comes from the address and port that was called, not from another port."""
    with lab.spawn(
        "a", [sys.executable, "-c", ANSWER, "0.1"], stdout=subprocess.PIPE, text=True
    ) as answering:
        assert answering.stdout is not None
        assert answering.stdout.readline() == "ready\n"
        assert lab.run("home1", [sys.executable, "-c", CALL, lab.address("a"), "1"]) == "answer\nlate\n"


@pytest.mark.long
def test_a_silent_flow_closes(lab: Lab) -> None:
    """A UDP flow lets nothing in any more after 30 s of silence."""
    with lab.spawn("a", [sys.executable, "-c", ANSWER, "32"], stdout=subprocess.PIPE, text=True) as answering:
        assert answering.stdout is not None
        assert answering.stdout.readline() == "ready\n"
        assert lab.run("home1", [sys.executable, "-c", CALL, lab.address("a"), "34"]) == "answer\n"


@pytest.mark.timeout(300)
def test_peers_behind_nats_meet_and_train(lab: Lab) -> None:
    """Two peers behind NATs notice it, say so, meet through them, and own parts like two reachable peers."""
    peers = {"a": train(lab, "a", "", len(lab.hosts))}
    read = {"a": lines(peers["a"])}
    way_in = read["a"]()["address"]
    for host in lab.hosts[1:]:
        peers[host] = train(lab, host, way_in, len(lab.hosts))
        read[host] = lines(peers[host])
    for host in lab.hosts[1:]:
        assert read[host]()["address"] == f"{lab.address(host)}:31330"
    results = {host: read[host]() for host in lab.hosts}
    assert len({result["lineage"] for result in results.values()}) == 1
    ids = {host: result["peer"] for host, result in results.items()}
    for host in lab.hosts:
        assert set(results[host]["links"]) == set(ids.values()) - {ids[host]}

    table = [sys.executable, "-m", "p2pavg", "peers", "nat", "--initial-peers", way_in, "--json", "-"]
    listed = json.loads(lab.run("b", ["env", f"PYTHONPATH={ROOT}", *table]))["peers"]
    client_only = {peer["peer_id"]: peer["client_only"] for peer in listed}
    assert client_only == {ids[host]: host.startswith("home") for host in lab.hosts}

    for host, process in peers.items():
        _, said = process.communicate(timeout=60)
        warned = f"cannot open connections to {lab.address(host)}:31330" in said
        assert warned == host.startswith("home"), said
        assert process.returncode == 0, said
