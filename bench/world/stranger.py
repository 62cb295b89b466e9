"""A stranger who floods ports and table: run on a host of its own, with one JSON object as its argument.

TCP: connections of three kinds (`bench.hostile`) to every address that it knows. UDP: datagrams of noise.
Table: ever new identities that announce themselves as peers of the run. Prints what it got done, as one line
of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from bench.hostile import Hostile
from p2pavg.errors import P2PAvgError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import parse_addresses

CONNECTIONS = 64  # to each address at once
DATAGRAMS_PER_S = 200  # to each address
DATAGRAM_BYTES = 300
IDENTITIES = 20
TABLE_S = 1.0  # between two new identities


async def _announce(way_in: str, run_id: str, until: float) -> dict[str, int]:
    """Ever new identities that say they train in the run."""
    nodes, refused = [], 0
    while time.monotonic() < until and len(nodes) + refused < IDENTITIES:
        try:
            node = await DHT.start(
                Identity.generate(), host="0.0.0.0", port=0, initial_peers=parse_addresses([way_in])
            )
            nodes.append(node)
            view = View(node, run_id)
            await view.announce(PeerInfo(node.identity.peer_id, tuple(node.external_addresses())))
        except P2PAvgError:
            refused += 1
        await asyncio.sleep(TABLE_S)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    for node in nodes:
        with suppress(P2PAvgError):
            await node.stop()
    return {"identities": len(nodes), "identities_refused": refused}


def main() -> None:
    """Flood for so many seconds."""
    config: dict[str, Any] = json.loads(sys.argv[1])
    until = time.monotonic() + config["seconds"]
    targets = []
    for address in config["addresses"]:
        host, _, port = address.rpartition(":")
        targets.append((host, int(port)))
    floods = [Hostile(target, CONNECTIONS) for target in targets]
    for flood in floods:
        flood.start()
    draw, sent = random.Random(config["seed"]), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.setblocking(False)

        async def noise() -> int:
            count = 0
            while time.monotonic() < until:
                for target in targets:
                    for _ in range(DATAGRAMS_PER_S // 20):
                        with suppress(OSError):
                            datagrams.sendto(draw.randbytes(DATAGRAM_BYTES), target)
                            count += 1
                await asyncio.sleep(0.05)
            return count

        async def all_at_once() -> tuple[int, dict[str, int]]:
            return await asyncio.gather(noise(), _announce(config["way_in"], config["run_id"], until))

        sent, table = asyncio.run(all_at_once())
    for flood in floods:
        flood.stopping = True
    for flood in floods:
        flood.join()
    done = {"connections": sum(f.opened for f in floods), "cut": sum(f.cut for f in floods)}
    print(json.dumps({**done, "datagrams": sent, **table}), flush=True)


if __name__ == "__main__":
    main()
