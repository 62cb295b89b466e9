"""Which addresses a node announces: all at which others reach it, and none that leads nowhere."""

from __future__ import annotations

import asyncio

import pytest

from p2pavg.identity import Identity
from p2pavg.membership import DHT
from p2pavg.membership.peerinfo import PeerInfo
from p2pavg.membership.table import address as addresses
from p2pavg.membership.table import dht as table
from p2pavg.membership.table import dialling_back
from p2pavg.membership.table.address import Address
from p2pavg.membership.table.whereabouts import Whereabouts, announceable
from p2pavg.membership.table.wire import Contact
from p2pavg.membership.view import View

OUT, INNER, LAN, PORT = "203.0.113.7", "100.64.0.2", "192.168.1.5", 31330
GIVEN = (OUT, 4242)


@pytest.mark.parametrize(
    ("seen", "own", "mapped", "tried", "found"),
    [
        # nobody has tried yet
        ([], [LAN], None, {}, [(LAN, PORT)]),
        ([OUT], [OUT], None, {}, [(OUT, PORT)]),
        ([OUT], [LAN], None, {}, [(OUT, PORT), (LAN, PORT)]),
        ([OUT], [LAN], GIVEN, {}, [GIVEN, (OUT, PORT), (LAN, PORT)]),
        # what does not work is left out, of the ways outside, and the router's port that leads to a neighbour
        ([OUT], [LAN], GIVEN, {GIVEN: True, (OUT, PORT): False}, [GIVEN, (LAN, PORT)]),
        ([OUT], [LAN], GIVEN, {GIVEN: False, (OUT, PORT): True}, [(OUT, PORT), (LAN, PORT)]),
        ([OUT], [LAN], GIVEN, {GIVEN: True, (OUT, PORT): True}, [GIVEN, (LAN, PORT)]),
        ([LAN, OUT], [LAN], GIVEN, {(LAN, 4242): True, GIVEN: True, (LAN, PORT): True}, [GIVEN, (LAN, PORT)]),
        # nobody gets through: it is told where the peer is seen, and nothing about its inside
        ([OUT], [LAN], None, {(OUT, PORT): False}, [(OUT, PORT)]),
        # nobody but those on this machine, who see it at loopback
        (["127.0.0.1", OUT], [LAN], None, {("127.0.0.1", PORT): True, (OUT, PORT): False}, [(LAN, PORT)]),
        # the gateway stands behind another one, which leads everything to it
        (
            [OUT],
            [LAN],
            (INNER, 4242),
            {GIVEN: True, (OUT, PORT): False},
            [GIVEN, (LAN, PORT)],
        ),
        ([OUT], [LAN], (INNER, 4242), {GIVEN: False, (OUT, PORT): False}, [(OUT, PORT)]),
        # the gateway has no connection to its provider yet
        ([OUT], [LAN], ("0.0.0.0", 4242), {}, [(OUT, PORT), (LAN, PORT)]),
        ([], [LAN], ("0.0.0.0", 4242), {}, [(LAN, PORT)]),
        # others inside see it at a bridge of its machine, where nobody outside gets through
        (
            [OUT, "172.17.0.1"],
            [OUT],
            None,
            {(OUT, PORT): True, ("172.17.0.1", PORT): False},
            [(OUT, PORT)],
        ),
        # both families: one of them is shut
        (
            [OUT, "2001:db8::5"],
            [LAN, "2001:db8::5"],
            None,
            {(OUT, PORT): True, ("2001:db8::5", PORT): False},
            [(OUT, PORT), (LAN, PORT)],
        ),
        ([OUT], [OUT, "2001:db8::5"], None, {}, [(OUT, PORT), ("2001:db8::5", PORT)]),
        # loopback and link-local addresses stay here, as long as there is another
        (["127.0.0.1"], [LAN], None, {}, [(LAN, PORT)]),
        (["127.0.0.1", OUT], [OUT], None, {}, [(OUT, PORT)]),
        (["127.0.0.1"], ["169.254.7.7"], None, {}, [("127.0.0.1", PORT)]),
        ([], ["127.0.0.1"], None, {}, [("127.0.0.1", PORT)]),
        ([OUT], ["169.254.7.7", "fe80::7"], None, {}, [(OUT, PORT)]),
    ],
)
def test_all_that_works_is_announced(
    seen: list[str],
    own: list[str],
    mapped: Address | None,
    tried: dict[Address, bool],
    found: list[Address],
) -> None:
    """Mapped, seen and own addresses, best first, as far as others got through where they tried."""
    assert announceable(seen, own, PORT, mapped, tried) == found


def test_nobody_says_that_a_node_is_at_an_address_of_one_link() -> None:
    """It is good for nobody else, and takes no voice."""
    where = Whereabouts()
    where.heard(Contact(b"7" * 20, ("169.254.9.9", 9)), "169.254.3.4")
    where.heard(Contact(b"8" * 20, ("fe80::9", 9)), "fe80::4")
    assert (where.hosts, where.voices) == ([], [])


def test_addresses_of_one_link_are_none_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that got no address from its network gives itself one, which no other network knows."""
    monkeypatch.setattr(addresses.socket, "inet_ntoa", lambda packed: "169.254.7.7")
    assert not any(addresses.is_link_local(host) for host in addresses.interface_addresses())


async def test_a_node_that_listens_on_one_address_is_announced_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a NAT, listening on its own private address: where others see it, and where its gateway leads a
    port to it; its own address is for those inside. On loopback it is there alone.
    """
    private = await DHT.start(Identity.generate(), host="127.0.0.2", port=0)
    try:
        assert private.external_addresses() == [("127.0.0.2", private.port)]
        monkeypatch.setattr(table, "is_loopback", lambda host: False)
        private._host, private._own = LAN, lambda: [LAN]
        private.node.whereabouts.heard(Contact(b"7" * 20, ("198.51.100.1", 9)), OUT)
        assert private.external_addresses() == [(OUT, private.port), (LAN, private.port)]
        private.mapped = GIVEN
        assert private.external_addresses()[0] == GIVEN

        dialled_ports = []

        async def dialled(node: object, contact: Contact, port: int) -> bool:
            dialled_ports.append(port)
            return port == GIVEN[1]

        monkeypatch.setattr(dialling_back, "ask_to_dial", dialled)
        found = await private.check_reachability()
        assert found.reachable
        assert found.tried == {GIVEN: True, (OUT, private.port): False}
        assert private.external_addresses() == [GIVEN, (LAN, private.port)]
        dialled_ports.clear()
        assert (await private.check_reachability(in_haste=True)).reachable
        assert dialled_ports == [GIVEN[1]]  # a newcomer does not wait for the ways that do not work
    finally:
        await private.stop()


async def test_nobody_is_dialled_at_an_address_of_one_link() -> None:
    """Whatever a record names: on another link it may be anybody's."""
    node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
    view = View(node, "run")
    try:
        theirs = (("169.254.7.7", PORT), ("fe80::7", PORT), (OUT, PORT))
        assert view._addresses_of(PeerInfo(b"7" * 20, theirs)) == [(OUT, PORT)]
        assert view._addresses_of(PeerInfo(b"7" * 20, theirs[:2])) == []
    finally:
        view.close()
        await node.stop()


def test_a_record_names_no_address_that_stands_for_many_machines() -> None:
    """The unspecified address would lead a reader to its own machine. IPv4 in IPv6 counts as IPv4, so that
    loopback and link-local addresses are known as such.
    """
    told = ("0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "::ffff:0.0.0.0", "::ffff:127.0.0.1", OUT)
    info = PeerInfo(b"7" * 20, tuple((host, PORT) for host in told))
    read = PeerInfo.decode(info.encode(), info.peer_id, 1)
    info = PeerInfo(b"7" * 20, tuple((host, PORT) for host in told[4:]))
    again = PeerInfo.decode(info.encode(), info.peer_id, 1)
    assert read is not None
    assert again is not None
    assert again.addresses == (("127.0.0.1", PORT), (OUT, PORT))
    assert read.addresses == again.addresses[:1]


async def test_one_that_sees_a_node_elsewhere_moves_it_once() -> None:
    """A member that sees it through another network, or lies, is no news each time it is asked; whatever else
    it says is.
    """
    node = await DHT.start(Identity.generate(), host="127.0.0.1", port=0)
    try:
        moves: list[int] = []
        node.on_moved = lambda: moves.append(1)
        whereabouts = node.node.whereabouts
        for network in (1, 2, 3):
            whereabouts.heard(Contact(bytes([network]) * 20, (f"198.51.{network}.1", PORT)), OUT)
        counts = []
        for host in (OUT, LAN, LAN, INNER, OUT, LAN):
            whereabouts.heard(Contact(b"9" * 20, ("192.0.2.1", PORT)), host)
            node.node.ask_where = lambda *_, **__: asyncio.sleep(0)  # type: ignore[method-assign, assignment, misc]
            await node.reviewed()
            counts.append(len(moves))
        assert counts == [0, 1, 1, 2, 2, 3]
        assert whereabouts.hosts == [OUT]
    finally:
        await node.stop()
