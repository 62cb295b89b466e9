"""One process of `bench dht`: many nodes on one event loop, driven by its parent."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import uvloop

from p2pavg.bench.workers import serve
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View, key_of
from p2pavg.membership.table.address import Address, format_host_port, parse_addresses
from p2pavg.membership.table.carrying.streams import connected
from p2pavg.membership.table.rpc import Rpc
from p2pavg.transport.links.carried import Carried
from p2pavg.transport.links.listening import TablePort

Result = TypeVar("Result")
KEY = key_of("bench dht")
RUN = "bench dht"
JOIN_SECONDS = 20.0


class NodeSwarm:
    """The nodes of this process, by number."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.nodes: dict[int, DHT] = {}
        self.views: dict[int, View] = {}
        self.tcp: dict[int, Carried] = {}
        self.way_in: list[str] = []
        self.lifetime = 15.0

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    # commands

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """Start the nodes `numbers`, each joining through `way_in`; returns the seconds that each took to
        join.
        """
        if command["loss"]:
            lose_datagrams(command["loss"], command["seed"])
        if command["without_udp"]:
            lose_datagrams(1.0, command["seed"])
        self.lifetime = command["lifetime"]
        return self.run(self._start(command["numbers"], parse_addresses(command["way_in"]), command["k"]))

    async def _start(self, numbers: list[int], way_in: Sequence[Address], k: int) -> dict[str, Any]:
        """Each node takes connections of the table at its port, as every peer does."""
        seconds = []
        for number in numbers:
            started = time.perf_counter()
            carried = self.tcp[number] = Carried()
            port = TablePort("127.0.0.1", 0, carried)
            self.nodes[number] = await DHT.start(
                Identity.generate(),
                host="127.0.0.1",
                port=port.port,
                dial=partial(_dial, carried),
                attach=port.attach,
                initial_peers=way_in,
                k=k,
                join_timeout=JOIN_SECONDS,
            )
            seconds.append(time.perf_counter() - started)
            way_in = [("127.0.0.1", self.nodes[number].port)]
        return {"address": format_host_port(*way_in[0]), "seconds": seconds}

    def store(self, command: dict[str, Any]) -> dict[str, Any]:
        """Store or refresh the records of `numbers`, all at once; returns ids and seconds of each."""
        return self.run(self._store([n for n in command["numbers"] if n in self.nodes]))

    async def _store(self, numbers: list[int]) -> dict[str, Any]:
        async def one(number: int) -> float:
            started = time.perf_counter()
            await self.nodes[number].store(KEY, b"%d" % number, self.lifetime)
            return time.perf_counter() - started

        seconds = await asyncio.gather(*map(one, numbers))
        return {"ids": {n: self.nodes[n].identity.peer_id.hex() for n in numbers}, "seconds": seconds}

    def get(self, command: dict[str, Any]) -> dict[str, Any]:
        """Read the key from each of `numbers` in turn; returns the ids found and the seconds of each."""
        return self.run(self._get(command["numbers"]))

    async def _get(self, numbers: list[int]) -> dict[str, Any]:
        seconds, found = [], []
        for number in numbers:
            started = time.perf_counter()
            records = await self.nodes[number].get(KEY)
            seconds.append(time.perf_counter() - started)
            found.append([peer_id.hex() for peer_id in records])
        return {"seconds": seconds, "found": found}

    def kill(self, command: dict[str, Any]) -> dict[str, Any]:
        """End the nodes `numbers` without a message to any other node."""
        return self.run(self._kill(command["numbers"]))

    async def _kill(self, numbers: list[int]) -> dict[str, Any]:
        await asyncio.gather(*(self.nodes.pop(number).stop() for number in numbers))
        return {}

    def views_start(self, command: dict[str, Any]) -> dict[str, Any]:
        """Make every node a member of one run."""
        return self.run(self._views_start())

    async def _views_start(self) -> dict[str, Any]:
        for number, node in self.nodes.items():
            view = self.views[number] = View(node, RUN)
            await view.refresh_now()
            addresses = tuple(node.external_addresses())
            await view.announce(PeerInfo(node.identity.peer_id, addresses, region="eu", lineage=bytes(20)))
        return {}

    def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        """Let the members idle for `seconds`; returns the bytes of each, both directions, and CPU seconds of
        all.
        """
        return self.run(self._measure(command["seconds"]))

    def _wire(self, number: int) -> int:
        """IP bytes of a member so far, both directions: what the kernel counted of its connections, headers
        and acknowledgements included, and its datagrams.
        """
        wire = self.nodes[number].wire
        for carried in self.tcp[number].by_peer().values():
            wire += carried
        return wire.sent + wire.received

    async def _measure(self, seconds: float) -> dict[str, Any]:
        before = {number: sum(node.traffic) for number, node in self.nodes.items()}
        wire = {number: self._wire(number) for number in self.nodes}
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        cpu = time.process_time() - cpu
        return {
            "bytes": [sum(node.traffic) - before[number] for number, node in self.nodes.items()],
            "wire_bytes": [self._wire(number) - wire[number] for number in self.nodes],
            "cpu_seconds": cpu,
            "seen": [len(view.peers) for view in self.views.values()],
        }


async def _dial(carried: Carried, host: str, port: int) -> socket.socket:
    """A connection that is counted."""
    return await connected(carried.socket(socket.AF_INET, socket.SOCK_STREAM), host, port)


def lose_datagrams(fraction: float, seed: int) -> None:
    """Lose every datagram to a node of this process with this probability from now on."""
    chance = random.Random(seed)
    receive = Rpc.datagram_received

    def lossy_receive(self: Rpc, data: bytes, addr: tuple[Any, ...]) -> None:
        if chance.random() >= fraction:
            receive(self, data, addr)

    Rpc.datagram_received = lossy_receive  # type: ignore[method-assign]


def main() -> int:
    swarm = NodeSwarm()
    return serve(swarm.start, swarm.store, swarm.get, swarm.kill, swarm.views_start, swarm.measure)


if __name__ == "__main__":
    sys.exit(main())
