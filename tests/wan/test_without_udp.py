"""Networks that drop UDP: peers find each other over TCP, alone and among others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import pytest

from p2pavg.lab import Lab
from p2pavg.lab.topology import parse
from tests.wan.test_routes import ROOT, Trainer

pytestmark = [pytest.mark.wan, pytest.mark.timeout(300)]

TOPOLOGY = """
hosts = ["a", "b", "c", "d"]
[[paths]]
rtt_ms = 20
"""


def listed(lab: Lab, host: str, way_in: str) -> dict[str, bool]:
    """Whether `p2pavg peers` says that UDP reaches each peer, by the host part of its address."""
    table = [sys.executable, "-m", "p2pavg", "peers", "routes", "--initial-peers", way_in, "--json", "-"]
    peers = json.loads(lab.run(host, ["env", f"PYTHONPATH={ROOT}", *table], timeout=60))["peers"]
    return {peer["addresses"][0].rpartition(":")[0]: peer["udp"] for peer in peers}


def until(look: Callable[[], object], wanted: object) -> None:
    deadline = time.monotonic() + 60
    while (found := look()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_a_swarm_without_udp_trains_loses_one_and_gains_one() -> None:
    """UDP dropped at every host: three peers train, one is killed, a newcomer gets the state and contributes;
    the table of peers says that all are on TCP.
    """
    with Lab(parse(TOPOLOGY, "noudp")) as lab:
        for host in lab.hosts:
            lab.set_node(host, drop_udp=True)
        first = Trainer(lab, "a")
        others = [Trainer(lab, host, first.start["address"]) for host in ("b", "c")]
        first.until(3)
        others[1].process.kill()
        first.until(2)
        newcomer = Trainer(lab, "d", others[0].start["address"])
        first.until(3)
        assert newcomer.until(3)["epoch"] >= newcomer.start["epoch"] > 0
        hosts = {lab.address(host): False for host in ("a", "b", "d")}
        until(lambda: listed(lab, "c", first.start["address"]), hosts)


def test_one_that_udp_reaches_no_more_stays() -> None:
    """UDP is cut off from one of two peers in the middle of a run: it stays, over TCP, and says so."""
    with Lab(parse(TOPOLOGY, "udpends")) as lab:
        first = Trainer(lab, "a")
        second = Trainer(lab, "b", first.start["address"])
        first.until(2)
        assert set(listed(lab, "c", first.start["address"]).values()) == {True}
        lab.set_node("b", drop_udp=True)
        both = {lab.address("a"): True, lab.address("b"): False}
        until(lambda: listed(lab, "c", first.start["address"]), both)
        assert [first.next()["peers"] for _ in range(20)] == [2] * 20
        assert second.process.poll() is None
