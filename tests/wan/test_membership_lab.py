"""Membership over emulated links, between namespaces: joining, addresses, partitions, one-way paths."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from p2pavg.lab import Lab

pytestmark = pytest.mark.wan

MEMBERS = """
import asyncio, json, sys
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import parse_addresses

async def main():
    way_in, count, lifetime = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    loop = asyncio.get_running_loop()
    members, addresses, seconds = [], [], []
    for number in range(count):
        start = loop.time()
        peers = parse_addresses([way_in] if way_in != "-" else [])
        port = 31330 + number
        node = await DHT.start(Identity.generate(), host="0.0.0.0", port=port, initial_peers=peers)
        view = View(node, "r", lifetime=lifetime)
        await view.refresh_now()
        await view.announce(PeerInfo(node.identity.peer_id, tuple(node.external_addresses())))
        seconds.append(loop.time() - start)
        members.append((node, view))
        addresses.append("%s:%d" % node.external_addresses()[0])
        way_in = addresses[0] if way_in == "-" else way_in
    print(json.dumps({"addresses": addresses, "seconds": seconds}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        seen = [sorted(info.addresses[0][0] for info in view.peers.values()) for _, view in members]
        print(json.dumps(seen), flush=True)

asyncio.run(main())
"""


class Host:
    """A process with `count` members of one run, on a host of a lab."""

    def __init__(self, lab: Lab, host: str, way_in: str, *, count: int = 1, lifetime: float = 15.0) -> None:
        argv = [sys.executable, "-c", MEMBERS, way_in, str(count), str(lifetime)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = lab.spawn(host, argv, **pipes)
        self._started: dict[str, Any] | None = None

    @property
    def started(self) -> dict[str, Any]:
        """The addresses that its members announce, and the seconds that each took to join."""
        if self._started is None:
            self._started = self._line()
        return self._started

    def sees(self) -> list[list[str]]:
        """For each member, the hosts of the peers that it sees."""
        _ = self.started
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seen: list[list[str]] = self._line()
        return seen

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "a member's process ended"
        return json.loads(line)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Ask until `condition` holds; False when it does not within `seconds`. Each answer takes its time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


def test_joining_fifty_over_300_ms_takes_eight_round_trips() -> None:
    """A newcomer 300 ms away is in the view of fifty members, and they in its own, within 8 RTT."""
    with Lab("two-300ms") as lab:
        here, there = lab.hosts
        swarm = Host(lab, here, "-", count=50)
        newcomer = Host(lab, there, swarm.started["addresses"][7])
        assert newcomer.started["seconds"][0] <= 8 * 0.3
        assert newcomer.sees() == [[lab.address(here)] * 50]
        assert all(lab.address(there) in seen for seen in swarm.sees())


def test_addresses_are_right_by_default() -> None:
    """Members that listen on every interface, the first one too, announce what others reach them at."""
    with Lab("lan-4") as lab:
        first = Host(lab, "a", "-")
        second = Host(lab, "b", first.started["addresses"][0])
        for host, name in ((first, "a"), (second, "b")):
            assert host.started["addresses"] == [f"{lab.address(name)}:31330"]
        assert within(5.0, lambda: first.sees() == [[lab.address("b")]])


def test_a_partition_and_a_one_way_path_heal() -> None:
    """Halves that lost each other meet again; a pair whose path works one way never lose each other."""
    with Lab("lan-4") as lab:
        first = Host(lab, "a", "-", lifetime=3.0)
        way_in = first.started["addresses"][0]
        hosts = [first, *(Host(lab, name, way_in, lifetime=3.0) for name in "bcd")]
        everybody = {lab.address(name) for name in "abcd"}

        def see_each_other() -> bool:
            return all(len(seen) == 3 for host in hosts for seen in host.sees())

        assert within(10.0, see_each_other)
        for left in "ab":
            for right in "cd":
                lab.set(left, right, both=True, down=True)
        assert within(10.0, lambda: all(len(seen) == 1 for host in hosts for seen in host.sees()))
        for left in "ab":
            for right in "cd":
                lab.set(left, right, both=True, down=False)
        assert within(30.0, see_each_other)
        lab.set("a", "b", down=True)
        assert not within(12.0, lambda: not see_each_other())
        assert {*hosts[0].sees()[0], lab.address("a")} == everybody
