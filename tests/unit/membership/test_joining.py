"""How long a newcomer takes to find a run's members, in virtual time."""

from __future__ import annotations

import asyncio

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.places import PROOF_SECONDS
from p2pavg.membership.table.address import format_host_port


def test_who_left_delays_no_newcomer() -> None:
    """A newcomer waits for no proof of a peer that has said that it leaves."""

    async def work() -> tuple[float, int]:
        network = Network(seed=1)
        loop = asyncio.get_running_loop()

        async def join(*ways_in: str) -> tuple[DHT, View, float]:
            node = await network.start(ways_in)
            view, began = View(node, "r"), loop.time()
            await view.refresh_now()
            took = loop.time() - began
            await view.announce(PeerInfo(node.identity.peer_id, tuple(node.external_addresses())))
            return node, view, took

        first, *_ = run = [await join()]
        way_in = format_host_port(*first[0].external_addresses()[0])
        run += [await join(way_in) for _ in range(3)]
        node, view, _ = run.pop()
        await view.leave()
        await node.stop()
        _, view, took = newcomer = await join(way_in)
        seen = len(view.peers)
        for node, view, _ in [*run, newcomer]:
            view.close()
            await node.stop()
        return took, seen

    took, seen = simulate(work())
    assert took < PROOF_SECONDS / 2
    assert seen == 3
