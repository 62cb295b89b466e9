"""What it costs to be an idle member of a large run: its traffic, simulated in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2pavg.bench.dht_simulation import Network, simulate
from p2pavg.identity import SIGNATURE_BYTES, Identity, peer_id_of
from p2pavg.membership import DHT, PeerInfo, View, record, rpc
from p2pavg.membership.address import format_host_port

WAVE = 50  # peers that join at a time, one second apart
ONE_WAY_S = 0.02
GRID_S = 0.005  # what is sent within it arrives together, which is cheaper to simulate


@dataclass(frozen=True)
class IdleCost:
    """Bytes of UDP payload a second, both directions, of each idle member; and what each sees."""

    bytes_per_s: list[float]
    datagrams_per_s_mean: float
    seen: list[int]


def idle_cost(members: int, *, warm_seconds: float, seconds: float) -> IdleCost:
    """Let `members` peers join one run, in waves, and then idle; measured from `warm_seconds` on.

    Signatures are hashes of the same size: nobody lies here, and their cost is not what is measured.
    """

    async def work() -> IdleCost:
        with _cheap_signatures():
            return await _idle_cost(members, warm_seconds, seconds)

    return simulate(work())


async def _idle_cost(members: int, warm_seconds: float, seconds: float) -> IdleCost:
    network = Network(seed=members)
    time = asyncio.get_running_loop().time
    network.delay = lambda source, destination: ONE_WAY_S + GRID_S - time() % GRID_S
    nodes: list[DHT] = []
    views: list[View] = []

    async def join(initial_peers: list[str]) -> None:
        node = await network.start(initial_peers, join_timeout=20.0, identity=_CheapIdentity())
        view = View(node, "simulated")
        await view.refresh_now()
        addresses = tuple(node.external_addresses())
        await view.announce(PeerInfo(node.identity.peer_id, addresses, region="eu", lineage=bytes(20)))
        nodes.append(node)
        views.append(view)

    await join([])
    while len(nodes) < members:
        wave = min(len(nodes), WAVE, members - len(nodes))
        ways_in = [format_host_port(*network.rng.choice(nodes).external_addresses()[0]) for _ in range(wave)]
        await asyncio.gather(*(join([way_in]) for way_in in ways_in))
        await asyncio.sleep(1.0)
    await asyncio.sleep(warm_seconds)
    before, datagrams = [sum(node.traffic) for node in nodes], network.datagrams
    await asyncio.sleep(seconds)
    cost = IdleCost(
        [(sum(node.traffic) - b) / seconds for node, b in zip(nodes, before, strict=True)],
        2 * (network.datagrams - datagrams) / seconds / members,
        [len(view.peers) for view in views],
    )
    for view in views:
        view.close()
    await asyncio.gather(*(node.stop() for node in nodes))
    return cost


class _CheapIdentity(Identity):
    def __init__(self) -> None:
        self.public_key = os.urandom(32)
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return _signature(self.public_key, message)


def _signature(public_key: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=public_key, digest_size=SIGNATURE_BYTES).digest()


@contextmanager
def _cheap_signatures() -> Iterator[None]:
    def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
        return signature == _signature(public_key, message)

    modules = (vars(record), vars(rpc))
    before = [module["verify"] for module in modules]
    for module in modules:
        module["verify"] = verify
    try:
        yield
    finally:
        for module, real in zip(modules, before, strict=True):
            module["verify"] = real
