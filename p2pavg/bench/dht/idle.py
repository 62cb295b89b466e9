"""The traffic of an idle member of a large run, simulated in virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.identity import SIGNATURE_BYTES, Identity, peer_id_of
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.pulse import LONGEST_READ_SECONDS, TABLE_SECONDS
from p2pavg.membership.roster import FULL_VIEW
from p2pavg.membership.table import record, rpc
from p2pavg.membership.table.address import format_host_port
from p2pavg.membership.table.dht import LONGEST_REFRESH_SECONDS
from p2pavg.membership.table.records import answers
from p2pavg.membership.table.records.entries import PREFIX_BYTES
from p2pavg.membership.table.wire import Contact
from p2pavg.membership.view import LIFETIME

RUN = "simulated"
MOST_JOINING = 200  # the joining of more members is not simulated
NEAR, FAR = 24, 64  # near and far contacts of a node whose joining is not simulated
WAVE = 50  # peers that join at a time, one second apart
ONE_WAY_S = 0.02
GRID_S = 0.005  # datagrams sent within this time arrive together, which is cheaper to simulate


@dataclass(frozen=True)
class IdleCost:
    """Bytes of UDP payload per second of each idle member, both directions; and the members that it knows."""

    bytes_per_s: list[float]
    datagrams_per_s_mean: float
    seen: list[int]


def idle_cost(members: int, *, warm_seconds: float, seconds: float) -> IdleCost:
    """Let `members` peers be in one run, and idle; measured from `warm_seconds` on.

    Hashes of the same size stand for signatures: no node lies here, and the cost of signing is not measured.
    """

    async def work() -> IdleCost:
        with _cheap_signatures():
            return await _idle_cost(members, warm_seconds, seconds)

    return simulate(work())


async def _idle_cost(members: int, warm_seconds: float, seconds: float) -> IdleCost:
    network = Network(seed=members)
    time = asyncio.get_running_loop().time
    network.delay = lambda source, destination: ONE_WAY_S + GRID_S - time() % GRID_S
    run = await (_joined if members <= MOST_JOINING else _settled)(network, members)
    await asyncio.sleep(warm_seconds)
    before, datagrams = [sum(node.traffic) for node, _ in run], network.datagrams
    await asyncio.sleep(seconds)
    cost = IdleCost(
        [(sum(node.traffic) - b) / seconds for (node, _), b in zip(run, before, strict=True)],
        2 * (network.datagrams - datagrams) / seconds / members,
        [len(view.peers) for _, view in run],
    )
    for _, view in run:
        view.close()
    await asyncio.gather(*(node.stop() for node, _ in run))
    return cost


async def _joined(network: Network, members: int) -> list[tuple[DHT, View]]:
    """All members join, in waves, each through a member that has joined already."""
    run: list[tuple[DHT, View]] = []

    async def join(initial_peers: list[str]) -> None:
        node = await network.start(initial_peers, join_timeout=20.0, identity=_CheapIdentity())
        view = View(node, RUN)
        await view.refresh_now()
        await view.announce(_info(node))
        run.append((node, view))

    await join([])
    while len(run) < members:
        wave = min(len(run), WAVE, members - len(run))
        ways_in = [format_host_port(*network.rng.choice(run)[0].external_addresses()[0]) for _ in range(wave)]
        await asyncio.gather(*(join([way_in]) for way_in in ways_in))
        await asyncio.sleep(1.0)
    return run


async def _settled(network: Network, members: int) -> list[tuple[DHT, View]]:
    """Members that have joined, with the contacts that they have in the end: to simulate the joining of so
    many takes too long.

    Each member has proven contacts near to it and far from it, and the records of its sample of the run. The
    time of its next lookup, which is rare, is random.
    """
    run: list[tuple[DHT, View]] = []
    for _ in range(members):
        node = await network.start(identity=_CheapIdentity())
        view = View(node, RUN)
        view._pulse.value = view._encode(_info(node))
        view._pulse._publication.advance(view._pulse.value, LIFETIME)
        run.append((node, view))
    ranked: list[list[tuple[int, int]]] = [[] for _ in run]
    for i, j in itertools.combinations(range(members), 2):
        rank = run[i][1]._roster._rank(run[j][0].identity.peer_id[:PREFIX_BYTES])
        ranked[i].append((rank, j))
        ranked[j].append((rank, i))
    everybody = [Contact(node.identity.peer_id, node.external_addresses()[0]) for node, _ in run]
    for (node, view), ranks in zip(run, ranked, strict=True):
        own = int.from_bytes(node.identity.peer_id, "big")
        near = sorted(everybody, key=lambda contact: contact.long_id ^ own)[1 : NEAR + 1]
        for contact in (*near, *network.rng.sample(everybody, FAR)):
            node.node.rpc.ledger.proved(contact.address, contact.id)
            node.node._heard_from(contact)
        for _, j in heapq.nsmallest(FULL_VIEW, ranks):
            publication = run[j][1]._pulse._publication
            assert publication.record is not None
            where = run[j][0].external_addresses()[0]
            node.node.rpc.ledger.proved(where, publication.record.peer_id)
            node.node.store.offer(
                publication.record, publication.refresh, LIFETIME, node.clock(), proved_at=where
            )
        _look_around_later(node, view, network.rng)
    return run


def _look_around_later(node: DHT, view: View, rng: random.Random) -> None:
    now, pulse = node.clock(), view._pulse
    node._refresh_interval, node._grown = LONGEST_REFRESH_SECONDS, 0
    node._next_refresh = now + rng.uniform(0.0, LONGEST_REFRESH_SECONDS)
    pulse._table_read_at = now - rng.uniform(0.0, TABLE_SECONDS)
    pulse._read_due = now + rng.uniform(0.0, LONGEST_READ_SECONDS)
    pulse._reveal_due = now + rng.uniform(0.0, view._roster.interval)


def _info(node: DHT) -> PeerInfo:
    return PeerInfo(node.identity.peer_id, tuple(node.external_addresses()), region="eu", lineage=bytes(20))


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

    modules = (vars(record), vars(rpc), vars(answers))
    before = [module["verify"] for module in modules]
    for module in modules:
        module["verify"] = verify
    try:
        yield
    finally:
        for module, real in zip(modules, before, strict=True):
            module["verify"] = real
