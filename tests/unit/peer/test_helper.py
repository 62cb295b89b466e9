"""A node that only helps: members find it in the run's view, and it introduces and relays."""

from __future__ import annotations

import socket

import pytest

from p2pavg.credentials import Authority
from p2pavg.errors import ConfigurationError, CredentialError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, View
from p2pavg.membership.reach.leases import Mapped
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.membership.table.address import format_host_port
from p2pavg.peer import mapping
from p2pavg.peer.helper import Helper
from p2pavg.peer.settings import Settings
from p2pavg.transport.links.carried import Way
from p2pavg.transport.ways import hole
from tests.unit.peer.reach.introduced import Introduced, until
from tests.unit.peer.reach.test_meetings import is_whole


@pytest.mark.parametrize(
    ("map_port", "closed", "maps"), [(None, True, True), (None, False, False), (True, False, True)]
)
async def test_a_helper_behind_a_router_is_reached_through_it(
    map_port: bool | None, closed: bool, maps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a closed run, and where it is wished, its gateway is asked for a port, which it announces first."""
    asked: list[tuple[str, int]] = []

    async def lease(self: Lessors, protocol: str, inside: int, outside: int, lease_s: int = 600) -> Mapped:
        asked.append((protocol, lease_s))
        return Mapped("203.0.113.9", 4242, float(lease_s), 1)

    monkeypatch.setattr(Lessors, "lease", lease)
    monkeypatch.setattr(mapping, "is_of_use", lambda host, *, wished: True)
    member = Authority.new("run").member().to_text() if closed else None
    settings = Settings("run", listen="0.0.0.0:0", initial_peers=[], credentials=member, map_port=map_port)
    helper = Helper(settings, Identity.generate())
    await helper.start()
    assert (helper.addresses()[0] == ("203.0.113.9", 4242)) is maps
    assert ("tcp", 600) in asked or not maps
    await helper.close()
    assert (("tcp", 0) in asked) is maps


async def test_a_helper_that_has_no_gateway_to_ask_opens_no_port() -> None:
    """It says what to do, also the second time, when the port would be taken if the first left it open."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = Settings("run", listen=f"127.0.0.1:{port}", initial_peers=[], map_port=True)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="map_port=True has no gateway to ask"):
            await Helper(settings, Identity.generate()).start()


async def test_a_helper_that_the_run_does_not_let_in_says_so() -> None:
    """With credentials of another authority, or with none, it ends with the reason, and no port is left."""
    made = [Authority.new("run").member().to_text() for _ in range(2)]
    door = Helper(
        Settings("run", listen="127.0.0.1:0", initial_peers=[], credentials=made[0]), Identity.generate()
    )
    await door.start()
    way = format_host_port(*door.addresses()[0])
    for credentials, why in ((made[1], "not of this run"), (None, "that run is closed")):
        settings = Settings("run", listen="127.0.0.1:0", initial_peers=[way], credentials=credentials)
        with pytest.raises(CredentialError, match=why):
            await Helper(settings, Identity.generate()).start()
    await door.close()


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("way", [Way.PUNCHED, Way.RELAYED])
async def test_two_peers_meet_through_a_helper(
    closed: bool, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an open run and of a closed one; it is in the view as one that does not train."""
    if way is Way.RELAYED:
        monkeypatch.setattr(hole, "available", lambda: False)
    authority = Authority.new("run") if closed else None
    members = [None if authority is None else authority.member() for _ in range(3)]
    settings = Settings(
        "run",
        listen="127.0.0.1:0",
        initial_peers=[],
        credentials=None if members[0] is None else members[0].to_text(),
        max_relay_mbps=100.0,
    )
    helper = Helper(settings, Identity.generate())
    await helper.start()
    hosts: list[Introduced] = []
    try:
        for credentials in members[1:]:
            identity = None if credentials is None else credentials.identity
            hosts.append(await Introduced(identity).start(credentials=credentials))
            await hosts[-1].endpoint.connect("127.0.0.1", helper.endpoint.port, timeout=20.0)
        one, two = hosts
        await until(lambda: len(helper.endpoint.links) == 2)
        dht = await DHT.start(one.identity, host="127.0.0.1", port=0, initial_peers=helper.addresses())
        view = View(dht, "run", credentials=members[1])
        await view.refresh_now()
        info = view.peers[helper.identity.peer_id]
        assert (info.role, info.client_only) == ("watcher", False)
        await view.leave()
        await dht.stop()
        assert await one.introductions.meet(two.id)
        await is_whole(one, two, way)
        assert bool(helper.introductions.relayed_bytes) == (way is Way.RELAYED)
    finally:
        for host in hosts:
            await host.close()
        await helper.close()
