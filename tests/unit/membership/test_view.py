from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from p2pavg.errors import AddressInUseError, ConfigurationError, UnreachableError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View, key_of
from p2pavg.membership.table.address import interface_addresses, parse_addresses, wildcard

SOON_S = 4.0  # on a busy machine; a record lasts 15 s, and a view is read anew every five


async def until(views: list[View], condition: Callable[[], bool], seconds: float) -> None:
    """Return when `condition` holds, looked at after each change of a view; fail after `seconds`."""
    changed = asyncio.Event()
    for view in views:
        view.on_change = changed.set
    async with asyncio.timeout(seconds):
        while not condition():
            changed.clear()
            await changed.wait()


@asynccontextmanager
async def swarm(count: int, *, lifetime: float = 15.0) -> AsyncIterator[tuple[list[DHT], list[View]]]:
    """`count` nodes of one table on loopback, each with a view of run "r"."""
    nodes = [await DHT.start(Identity.generate(), host="127.0.0.1", port=0)]
    for _ in range(count - 1):
        way_in = "127.0.0.1", nodes[-1].port
        nodes.append(await DHT.start(Identity.generate(), host="127.0.0.1", port=0, initial_peers=[way_in]))
    views = [View(node, "r", lifetime=lifetime) for node in nodes]
    try:
        yield nodes, views
    finally:
        for view in views:
            view.close()
        await asyncio.gather(*(node.stop() for node in nodes))


def info_of(node: DHT, **fields: object) -> PeerInfo:
    return PeerInfo(node.identity.peer_id, tuple(node.external_addresses()), **fields)  # type: ignore[arg-type]


async def announce_all(nodes: list[DHT], views: list[View]) -> None:
    for node, view in zip(nodes, views, strict=True):
        await view.refresh_now()
        await view.announce(info_of(node))


async def test_bytes_to_this_machine_are_told_apart() -> None:
    """A table of processes on one machine sends nothing over a network: loopback, and an interface's
    address.
    """
    one = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
    two = await DHT.start(
        Identity.generate(), host="127.0.0.1", port=0, initial_peers=[("127.0.0.1", one.port)]
    )
    try:
        assert two.wire.sent_here == two.wire.sent > 0
        carrier = two.node.rpc.carrier
        assert all(carrier.is_here(own) for own in interface_addresses())
        assert not carrier.is_here("192.0.2.1")
    finally:
        await two.stop()
        await one.stop()


async def test_a_newcomer_sees_all_and_is_seen_at_once() -> None:
    """After refresh_now and announce, everybody sees the newcomer, and it everybody, at once."""
    async with swarm(5) as (nodes, views):
        await announce_all(nodes, views)
        await until(views, lambda: all(len(view.peers) == 4 for view in views), SOON_S)
        assert set(views[0].peers) == {node.identity.peer_id for node in nodes[1:]}


@pytest.mark.skipif(wildcard() != "::", reason="this system has no IPv6")
async def test_a_peer_is_dialled_where_it_has_proven_itself_too() -> None:
    """A machine may not know of the address by which another one found it, as one of the other family: it
    announces something else, and is dialled there all the same.
    """
    one = await DHT.start(Identity.generate(), host="::", port=0)
    two = await DHT.start(Identity.generate(), host="::", port=0, initial_peers=[("::1", one.port)])
    views = [View(node, "r") for node in (one, two)]
    try:
        me = one.identity.peer_id
        await views[0].announce(PeerInfo(me, (("192.0.2.1", one.port),)))
        await views[1].refresh_now()
        await views[1].announce(info_of(two))
        await until(views, lambda: me in views[1].peers, SOON_S)
        async with asyncio.timeout(SOON_S):
            while views[1].addresses_to_dial(views[1].peers[me])[-1:] != [("::1", one.port)]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        for view in views:
            view.close()
        await two.stop()
        await one.stop()


async def test_a_change_reaches_everybody() -> None:
    """What a peer announces anew replaces what it said before, in every view, at once."""
    async with swarm(3) as (nodes, views):
        await announce_all(nodes, views)
        await views[1].announce(
            info_of(nodes[1], epoch=7, lineage=b"x" * 20, samples_per_second=2.5, region="eu")
        )
        seen = nodes[1].identity.peer_id
        await until(views, lambda: all(v.peers[seen].epoch == 7 for v in (views[0], views[2])), SOON_S)
        assert views[0].peers[seen].samples_per_second == 2.5


async def test_a_clean_leave_is_seen_at_once() -> None:
    """A peer that leaves is gone from the others' views at once."""
    async with swarm(4) as (nodes, views):
        await announce_all(nodes, views)
        await until(views, lambda: all(len(view.peers) == 3 for view in views), SOON_S)
        await views[2].leave()
        others = (views[0], views[1], views[3])
        await until(
            views, lambda: all(nodes[2].identity.peer_id not in view.peers for view in others), SOON_S
        )


async def test_a_dead_peer_expires() -> None:
    """A peer that stops without a word leaves every view when its lifetime of a second and a half is over."""
    async with swarm(4, lifetime=1.5) as (nodes, views):
        await announce_all(nodes, views)
        await until(views, lambda: all(len(view.peers) == 3 for view in views), SOON_S)
        views[3].close()
        await nodes[3].stop()
        await until(views, lambda: all(len(view.peers) == 2 for view in views[:3]), SOON_S)


async def test_the_transports_evidence_counts() -> None:
    """A peer reported dead is gone at once, and is back when it is reported alive or says something new."""
    async with swarm(2) as (nodes, views):
        await announce_all(nodes, views)
        other = nodes[1].identity.peer_id
        await until(views, lambda: other in views[0].peers, SOON_S)
        views[0].report_dead(other)
        assert other not in views[0].peers
        views[0].report_alive(other)
        assert other in views[0].peers
        views[0].report_dead(other)
        await views[1].announce(info_of(nodes[1], epoch=1))
        await until(views, lambda: other in views[0].peers, SOON_S)


async def test_runs_do_not_mix() -> None:
    """Two runs over one table see only their own peers."""
    async with swarm(2) as (nodes, views):
        stranger = View(nodes[1], "another run")
        await views[0].announce(info_of(nodes[0]))
        await stranger.announce(info_of(nodes[1]))
        await stranger.refresh_now()
        await views[0].refresh_now()
        assert not stranger.peers
        assert not views[0].peers
        stranger.close()


async def test_two_peers_that_name_each_other_find_each_other() -> None:
    """Two nodes that start at the same moment, each with the other's address, both join."""
    probe = [await DHT.start(Identity.generate(), host="127.0.0.1", port=0) for _ in range(2)]
    ports = [node.port for node in probe]
    await asyncio.gather(*(node.stop() for node in probe))
    nodes = await asyncio.gather(
        *(
            DHT.start(
                Identity.generate(),
                host="127.0.0.1",
                port=mine,
                initial_peers=[("127.0.0.1", other)],
            )
            for mine, other in (ports, ports[::-1])
        )
    )
    key = key_of("together")
    await nodes[0].store(key, b"here", 5.0)
    assert set(await nodes[1].get(key)) == {nodes[0].identity.peer_id}
    await asyncio.gather(*(node.stop() for node in nodes))


async def test_bad_addresses_are_clear_errors() -> None:
    """Malformed, unreachable and taken addresses each raise their own error, within seconds."""
    identity = Identity.generate()
    for text in ("nonsense", "host:", ":1", "host:99999", "::1:5", "host:0"):
        with pytest.raises(ConfigurationError, match=r"host:port|ambiguous"):
            await DHT.start(identity, host="127.0.0.1", port=0, initial_peers=parse_addresses([text]))
    with pytest.raises(UnreachableError, match="none of the initial peers"):
        await DHT.start(
            identity,
            host="127.0.0.1",
            port=0,
            initial_peers=[("127.0.0.1", 9)],
            join_timeout=0.3,
        )
    node = await DHT.start(identity, host="127.0.0.1", port=0)
    with pytest.raises(AddressInUseError, match="taken"):
        await DHT.start(Identity.generate(), host="127.0.0.1", port=node.port)
    await node.stop()


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked, in the order of the record and of the name, and none twice."""
    async with swarm(1) as (_, (view,)):
        told = (("peer.example", 5), ("203.0.113.5", 5), ("203.0.113.5", 6))
        known = {"peer.example": ["2001:db8::5", "203.0.113.5"]}
        monkeypatch.setattr(view._places._names, "numeric", lambda host: known.get(host, [host]))
        found = view._places._numeric(PeerInfo(b"7" * 20, told))
        assert found == [("2001:db8::5", 5), ("203.0.113.5", 5), ("203.0.113.5", 6)]
