"""Whole tables in virtual time, over a simulated network: joining, dying, merging, lying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2pavg.bench.dht.simulation import Network, simulate
from p2pavg.errors import IdentityInUseError, UnreachableError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View, key_of
from p2pavg.membership.table.node import Node
from p2pavg.membership.table.record import Chain, Refresh, sign_record
from p2pavg.membership.table.records.entries import Entry
from p2pavg.membership.table.wire import RequestKind

KEY = key_of("test")
ONE_WAY = 0.02
RTT = 2 * ONE_WAY


def network(**options: Any) -> Network:
    made = Network(**options)
    made.delay = lambda source, destination: ONE_WAY
    return made


def address_of(node: DHT) -> str:
    return f"{node.external_addresses()[0][0]}:31330"


async def table(net: Network, count: int) -> list[DHT]:
    """`count` nodes, each joining through a random one that is there already."""
    nodes = [await net.start()]
    for _ in range(count - 1):
        nodes.append(await net.start([address_of(net.rng.choice(nodes))], join_timeout=20.0))
    return nodes


async def member(net: Network, initial_peers: list[str], run: str = "r", **options: Any) -> tuple[DHT, View]:
    """A node that joins, reads the run and announces itself: what a training peer does."""
    node = await net.start(initial_peers, **options)
    view = View(node, run)
    await view.refresh_now()
    await view.announce(PeerInfo(node.identity.peer_id, tuple(node.external_addresses())))
    return node, view


async def members(net: Network, count: int) -> list[tuple[DHT, View]]:
    made = [await member(net, [])]
    for _ in range(count - 1):
        made.append(await member(net, [address_of(made[-1][0])]))
    return made


async def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    """Virtual seconds until `condition` holds; fails after `limit`."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < limit, "still not so"
        await asyncio.sleep(0.01)
    return loop.time() - start


def sees(view: View, *nodes: DHT) -> bool:
    return {node.identity.peer_id for node in nodes} <= view.peers.keys()


def run(work: Coroutine[Any, Any, None]) -> None:
    simulate(work)


def test_a_read_passes_by_the_dead_at_the_pace_of_those_that_answer() -> None:
    """Three of the closest nodes are dead, and their answers took long and unevenly when they were last
    measured: a read goes on without them as soon as those that answer now show that they are late.
    """

    async def work() -> None:
        net = network()
        net.delay = lambda source, destination: 0.002
        nodes = await table(net, 12)
        reader, *others = nodes
        assert await others[-1].store(KEY, b"x", 60.0)
        others.sort(key=lambda node: distance(node.identity.peer_id))
        await asyncio.gather(*(node.stop() for node in others[:3]))
        for node in others[:3]:
            known = reader.node.rpc._endpoints.at((node.external_addresses()[0][0], 31330))
            known.smoothed, known.deviation = 0.02, 0.1
        begun = asyncio.get_running_loop().time()
        await reader.get(KEY)
        assert asyncio.get_running_loop().time() - begun < 0.2  # it was 0.43

    def distance(peer_id: bytes) -> int:
        return int.from_bytes(peer_id, "big") ^ int.from_bytes(KEY, "big")

    run(work())


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_records_survive_deaths_and_loss(loss: float) -> None:
    """With 30% of 60 nodes killed, the first one included, every survivor finds every living record."""

    async def scenario() -> None:
        net = network(seed=7, loss=loss)
        nodes = await table(net, 60)
        publishers = net.rng.sample(nodes, 20)
        await asyncio.gather(*(node.store(KEY, b"here", 15.0) for node in publishers))
        dead = {nodes[0], *net.rng.sample(nodes[1:], 17)}
        await asyncio.gather(*(node.stop() for node in dead))
        living = [node for node in publishers if node not in dead]
        await asyncio.gather(*(node.store(KEY, b"here", 15.0) for node in living))
        wanted = {node.identity.peer_id for node in living}
        readers = net.rng.sample([node for node in nodes if node not in dead], 10)
        found = await asyncio.gather(*(node.get(KEY) for node in readers))
        assert all(wanted <= records.keys() for records in found)

    run(scenario())


def test_joining_a_swarm_of_fifty_takes_eight_round_trips() -> None:
    """From start to being in everybody's view, with everybody in its own, a newcomer needs at most 8 RTT."""

    async def scenario() -> None:
        net = network(seed=3)
        made = await members(net, 50)
        await seconds_until(lambda: all(len(view.peers) == 49 for _, view in made), 20.0)
        loop = asyncio.get_running_loop()
        start = loop.time()
        joining = asyncio.ensure_future(member(net, [address_of(made[17][0])]))
        await seconds_until(lambda: all(len(view.peers) == 50 for _, view in made), 8 * RTT)
        _, view = await joining
        assert len(view.peers) == 50
        assert loop.time() - start <= 8 * RTT

    run(scenario())


def test_two_swarms_merge_after_one_introduction() -> None:
    """Two swarms of four, started apart, are one swarm within five seconds of one node's introduction."""

    async def scenario() -> None:
        net = network(seed=5)
        left, right = await members(net, 4), await members(net, 4)
        everybody = left + right
        assert not any(sees(view, *(node for node, _ in right)) for _, view in left)
        assert await left[2][0].introduce(address_of(right[1][0]))
        await seconds_until(lambda: all(len(view.peers) == 7 for _, view in everybody), 5.0)

    run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_that_knows_both_swarms_merges_them(seed: int) -> None:
    """Two swarms of four become one within five seconds when a peer joins with an address of each."""

    async def scenario() -> None:
        net = network(seed=seed)
        left, right = await members(net, 4), await members(net, 4)
        joining = asyncio.ensure_future(member(net, [address_of(left[1][0]), address_of(right[2][0])]))
        await seconds_until(lambda: all(len(view.peers) == 8 for _, view in left + right), 5.0)
        _, view = await joining
        assert len(view.peers) == 8

    run(scenario())


def test_a_growing_table_is_read_less_and_less_often() -> None:
    """Nodes that come by the second make a member of ten read the run 20 times in two minutes at most; the
    first after a calm time makes it read within a second.
    """

    async def scenario() -> None:
        _, view = (await members(network(seed=7), 10))[4]
        pulse = view._pulse
        reads = set()
        for _ in range(120):
            pulse.table_grew()
            await asyncio.sleep(1.0)
            reads.add(pulse._read_at)
        assert 5 <= len(reads) <= 20
        await asyncio.sleep(61.0)
        before = pulse._read_at
        await seconds_until(lambda: pulse._read_at > before, 180.0)
        await asyncio.sleep(5.0)  # or it has just read, of its own accord
        before = pulse._read_at
        pulse.table_grew()
        await asyncio.sleep(1.0)
        assert pulse._read_at > before

    run(scenario())


def test_a_partition_heals_by_itself() -> None:
    """Sides that were cut off from each other until they forgot each other find each other again."""

    async def scenario() -> None:
        net = network(seed=6)
        made = await members(net, 6)
        await seconds_until(lambda: all(len(view.peers) == 5 for _, view in made), 10.0)
        side = {node.external_addresses()[0] for node, _ in made[:3]}
        net.reaches = lambda source, destination: (source in side) == (destination in side)
        await seconds_until(lambda: all(len(view.peers) == 2 for _, view in made), 20.0)
        await asyncio.sleep(60.0)
        net.reaches = lambda source, destination: True
        await seconds_until(lambda: all(len(view.peers) == 5 for _, view in made), 30.0)

    run(scenario())


def test_a_swarm_on_slow_links_finds_its_pace() -> None:
    """Peers three seconds apart join each other, and stay in each other's view, without losing anybody."""

    async def scenario() -> None:
        net = network(seed=20)
        net.delay = lambda source, destination: 1.5
        made = await members(net, 4)
        await seconds_until(lambda: all(len(view.peers) == 3 for _, view in made), 60.0)
        for _ in range(120):
            await asyncio.sleep(1.0)
            assert all(len(view.peers) == 3 for _, view in made)

    run(scenario())


def test_a_swarm_recovers_from_a_freeze_of_everything() -> None:
    """After two minutes in which every datagram took 20 s, all see each other again in half a minute."""

    async def scenario() -> None:
        net = network(seed=21)
        made = await members(net, 8)
        await seconds_until(lambda: all(len(view.peers) == 7 for _, view in made), 10.0)
        net.delay = lambda source, destination: 20.0
        await asyncio.sleep(120.0)
        assert not any(view.peers for _, view in made)
        net.delay = lambda source, destination: ONE_WAY
        await seconds_until(lambda: all(len(view.peers) == 7 for _, view in made), 30.0)

    run(scenario())


def test_a_restart_on_a_new_address_is_found_within_a_second() -> None:
    """A node that comes back with its identity elsewhere is found there, though its clock went back."""

    async def scenario() -> None:
        net = network(seed=8)
        made = await members(net, 5)
        node, view = made.pop()
        view.close()
        await node.stop()
        start = asyncio.get_running_loop().time()
        node, view = await member(net, [address_of(made[0][0])], identity=node.identity, incarnation=1)
        new = node.external_addresses()[0]
        await seconds_until(
            lambda: all(new in other.peers[node.identity.peer_id].addresses for _, other in made), 1.0
        )
        assert asyncio.get_running_loop().time() - start < 1.0

    run(scenario())


def test_a_dead_peer_is_gone_after_its_lifetime_and_a_live_one_stays() -> None:
    """With 5% loss, views drop a dead peer within lifetime + 1 s, and no live peer for minutes."""

    async def scenario() -> None:
        net = network(seed=9, loss=0.05)
        made = await members(net, 12)
        await seconds_until(lambda: all(len(view.peers) == 11 for _, view in made), 10.0)
        node, view = made.pop(4)
        view.close()
        await node.stop()
        gone = node.identity.peer_id
        await seconds_until(lambda: all(gone not in view.peers for _, view in made), 16.0)
        losses: list[int] = []
        for _, view in made:
            view.on_change = lambda: losses.append(1)
        await asyncio.sleep(180.0)
        assert not losses

    run(scenario())


def test_a_leave_is_seen_at_once() -> None:
    """A clean leave is in every view within a second, and is not undone by old records."""

    async def scenario() -> None:
        net = network(seed=10, loss=0.05)
        made = await members(net, 12)
        await seconds_until(lambda: all(len(view.peers) == 11 for _, view in made), 10.0)
        node, view = made.pop(4)
        gone = node.identity.peer_id
        departing = asyncio.ensure_future(view.leave())
        await seconds_until(lambda: all(gone not in view.peers for _, view in made), 1.0)
        await departing
        for _ in range(40):
            await asyncio.sleep(1.0)
            assert all(gone not in view.peers for _, view in made)

    run(scenario())


def test_a_one_way_pair_still_sees_each_other() -> None:
    """Two peers that cannot exchange a datagram stay in each other's view, through the others."""

    async def scenario() -> None:
        net = network(seed=11)
        made = await members(net, 5)
        await seconds_until(lambda: all(len(view.peers) == 4 for _, view in made), 10.0)
        pair = {node.external_addresses()[0] for node, _ in made[:2]}
        net.reaches = lambda source, destination: not (source in pair and destination in pair)
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert sees(made[0][1], made[1][0])
            assert sees(made[1][1], made[0][0])

    run(scenario())


def test_a_watcher_sees_without_being_seen() -> None:
    """A view that announces nothing follows the run for minutes, and nobody sees it."""

    async def scenario() -> None:
        net = network(seed=12)
        made = await members(net, 4)
        node = await net.start([address_of(made[0][0])], client_only=True)
        view = View(node, "r")
        await seconds_until(lambda: len(view.peers) == 4, 2.0)
        losses: list[int] = []
        view.on_change = lambda: losses.append(1)
        await asyncio.sleep(120.0)
        assert not losses
        assert not any(sees(other, node) for _, other in made)

    run(scenario())


def test_nobody_answers() -> None:
    """A start whose initial peers are silent fails in seconds and says what to check."""

    async def scenario() -> None:
        net = network()
        with pytest.raises(UnreachableError, match=r"over UDP or TCP .* open, for TCP at least"):
            await net.start(["10.9.9.9:31330", "10.9.9.8:31330"])
        assert asyncio.get_running_loop().time() < 8.0

    run(scenario())


def test_a_dead_initial_peer_does_not_delay() -> None:
    """With one dead and one live initial peer, joining takes one round trip."""

    async def scenario() -> None:
        net = network()
        first = await net.start()
        start = asyncio.get_running_loop().time()
        await net.start(["10.9.9.9:31330", address_of(first)])
        assert asyncio.get_running_loop().time() - start <= 1.01 * RTT

    run(scenario())


def test_a_node_that_names_itself_is_alone() -> None:
    """A node whose only initial peer is its own address starts a new table; a peer that trains is told."""

    async def scenario() -> None:
        node = await network().start(["10.0.0.2:31330"])
        assert node.contacts == 0

    run(scenario())


def test_a_tool_with_the_credentials_of_a_running_process_is_told() -> None:
    """Who only looks, with the identity of the very node that it names, learns that by name."""

    async def scenario() -> None:
        net, identity = network(), Identity.generate()
        await net.start(["10.0.0.2:31330"], identity=identity)
        with pytest.raises(IdentityInUseError, match="another process uses the identity of peer"):
            await net.start(["10.0.0.2:31330"], identity=identity, client_only=True)

    run(scenario())


def lying(node: DHT, entries: list[Entry]) -> None:
    """Make a node list these entries for every key, on top of claiming a different set each time."""
    honest = node.node._index

    def index(key: bytes, cursor: bytes, known: bytes, sender: bytes, room: int) -> list[Any] | None:
        answer = honest(key, cursor, known, sender, room)
        assert answer is not None
        answer[0] = b"".join(entry.encode() for entry in entries)
        return answer

    node.node._index = index  # type: ignore[method-assign]


def test_liars_cannot_hide_extend_or_invent() -> None:
    """Half the table claims newer versions, longer lives and unknown peers: readers get the truth."""

    async def scenario() -> None:
        net = network(seed=13)
        nodes = await table(net, 12)
        honest, liars = nodes[:6], nodes[6:]
        victim, dead = honest[0], honest[1]
        await victim.store(KEY, b"truth", 60.0)
        await dead.store(KEY, b"was here", 5.0)
        said = (await dead.get(KEY))[dead.identity.peer_id]
        refresh = Refresh(200, b"0123456789")
        lies = [
            Entry(victim.identity.peer_id[:8], 2**47, 9, refresh, 300.0),
            Entry(dead.identity.peer_id[:8], said.incarnation, said.sequence, refresh, 300.0),
            Entry(b"invented", 5, 5, refresh, 300.0),
        ]
        for liar in liars:
            lying(liar, lies)
        await asyncio.sleep(6.0)
        for reader in honest[2:]:
            records = await reader.get(KEY)
            assert {peer_id: record.value for peer_id, record in records.items()} == {
                victim.identity.peer_id: b"truth"
            }

    run(scenario())


def test_nobody_can_write_for_another() -> None:
    """A record signed by somebody else, or altered on its way, is refused by every holder."""

    async def scenario() -> None:
        net = network(seed=14)
        nodes = await table(net, 4)
        await nodes[0].store(KEY, b"mine", 60.0)
        forger, owner = Identity.generate(), nodes[0].identity
        record = sign_record(
            forger, KEY, b"forged", incarnation=2**47, sequence=1, lifetime=60.0, anchor=Chain().anchor
        )
        altered = record.encoded.replace(forger.public_key, owner.public_key)
        node: Node = nodes[1].node
        for contact in list(node.contacts):
            await node.rpc.ask(contact.address, RequestKind.STORE, [altered, 0, record.anchor, 60000])
            await node.rpc.ask(contact.address, RequestKind.STORE, [altered, 0, record.anchor, 60000])
        for reader in nodes:
            assert [r.value for r in (await reader.get(KEY)).values()] == [b"mine"]

    run(scenario())


def test_an_unproven_address_gets_little() -> None:
    """Whoever asks in somebody else's name makes a node send at most three times the bytes it sent itself."""

    async def scenario() -> None:
        net = network(seed=15)
        nodes = await table(net, 20)
        target = nodes[3]
        sent: list[int] = []
        victim = ("10.8.8.8", 4444)
        deliver = net.send

        def spy(data: bytes, source: tuple[str, int], destination: tuple[str, int]) -> None:
            if destination == victim:
                sent.append(len(data))
            deliver(data, source, destination)

        net.send = spy  # type: ignore[method-assign]
        stranger = Node(Identity.generate(), k=8, client_only=False, clock=target.clock)
        outgoing: list[bytes] = []
        stranger.rpc.carrier.send = lambda data, address: not outgoing.append(data)  # type: ignore[method-assign, func-returns-value]
        here = target.external_addresses()[0]
        for kind, body in (
            (RequestKind.PING, []),
            (RequestKind.FIND, [KEY]),
            (RequestKind.INDEX, [KEY, b"", b""]),
        ):
            stranger.rpc.call(here, kind, body, lambda message: None)
        for data in outgoing:
            net.send(data, victim, here)
        await asyncio.sleep(10.0)
        assert 0 < sum(sent) <= 3 * sum(map(len, outgoing))
        stranger.close()

    run(scenario())


@pytest.mark.parametrize("reachable", [True, False])
def test_a_peer_learns_whether_others_reach_it(reachable: bool) -> None:
    """Others dial back at the address where they see a peer; when that fails the advice names the address."""

    async def scenario() -> None:
        net = network(seed=16)
        dialled: list[tuple[str, int]] = []

        async def connect(host: str, port: int) -> bool:
            dialled.append((host, port))
            return reachable

        first = await net.start(connect=connect)
        second = await net.start([address_of(first)])
        found = await second.check_reachability()
        assert found.reachable is reachable
        assert dialled == [second.external_addresses()[0]]
        assert found.address == address_of(second)
        assert ("announce" in found.advice) is not reachable
        alone = await network().start()
        assert (await alone.check_reachability()).reachable is None

    run(scenario())


def test_peers_behind_nat_work_client_only() -> None:
    """Two client-only peers behind NATs and two reachable ones all see each other, for minutes."""

    async def scenario() -> None:
        net = network(seed=17)
        made = await members(net, 2)
        hidden: list[tuple[str, int]] = []
        opened: set[tuple[tuple[str, int], tuple[str, int]]] = set()

        def reaches(source: tuple[str, int], destination: tuple[str, int]) -> bool:
            opened.add((source, destination))
            return destination not in hidden or (destination, source) in opened

        net.reaches = reaches
        for host in ("10.7.0.1", "10.7.0.2"):
            hidden.append((host, 31330))
            node = await net.start([address_of(made[0][0])], address=(host, 31330), client_only=True)
            view = View(node, "r")
            await view.refresh_now()
            await view.announce(PeerInfo(node.identity.peer_id, ((host, 31330),), client_only=True))
            made.append((node, view))
        await seconds_until(lambda: all(len(view.peers) == 3 for _, view in made), 10.0)
        for _ in range(120):
            await asyncio.sleep(1.0)
            assert all(len(view.peers) == 3 for _, view in made)

    run(scenario())


def test_a_large_run_is_sampled_and_every_peer_is_seen() -> None:
    """Beyond the limit a view is a sample, its peers are alive, and everybody is in somebody's view."""

    async def scenario() -> None:
        net = network(seed=18)
        made = await members(net, 24)
        for _, view in made:
            view._roster._limit = 10
        await asyncio.sleep(60.0)
        assert all(8 <= len(view.peers) <= 24 for _, view in made)
        newcomer, view = await member(net, [address_of(made[0][0])])
        view._roster._limit = 10
        assert len(view.peers) >= 8
        await seconds_until(lambda: any(sees(other, newcomer) for _, other in made), 5.0)

    run(scenario())


def test_a_lookup_may_end_while_a_record_is_being_placed() -> None:
    """Holders found by a reader meanwhile do not disturb a placement under way."""

    async def scenario() -> None:
        net = network(seed=19)
        nodes = await table(net, 12)
        publication = nodes[0].publication(KEY)
        placing = asyncio.ensure_future(nodes[0].store(KEY, b"v", 30.0))
        for count in range(9):
            await asyncio.sleep(0.6 * ONE_WAY)
            publication.use_holders(list(nodes[0].node.contacts)[:count])
        assert await placing
        assert await nodes[0].store(KEY, b"w", 30.0)
        assert [record.value for record in (await nodes[5].get(KEY)).values()] == [b"w"]

    run(scenario())
