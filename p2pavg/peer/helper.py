"""Helper: a node that takes part in a run without training. Members name it as a way in; it introduces those
that cannot dial each other, and relays for those that cannot meet.
"""

from __future__ import annotations

from typing import Any

from p2pavg.identity import Identity
from p2pavg.membership import PeerInfo, View
from p2pavg.peer import advice, mapping
from p2pavg.peer.ports import open_ports
from p2pavg.peer.reach.introductions import Introductions
from p2pavg.peer.reach.reachability import OwnAddresses
from p2pavg.peer.settings import Settings
from p2pavg.transport.engine import NoEvents
from p2pavg.transport.links.link import Link
from p2pavg.transport.python.engine import PythonEngine


class Helper:
    """Its links have no data streams. Runs on the current event loop."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        """identity: of an open run; a closed one has it from the credentials."""
        self.settings = settings
        settings.warn_if_open()
        credentials = settings.membership
        self.identity = identity if credentials is None else credentials.identity

    async def start(self) -> None:
        """Open the ports, join the table and tell the run. Raises P2PAvgError with what to do."""
        wished = bool(self.settings.map_port)
        maps_port = self.settings.maps_port and mapping.is_of_use(self.settings.bind[0], wished=wished)
        self._engine = PythonEngine(NoEvents())
        try:
            self.endpoint, self.dht = await open_ports(
                self.settings, self.identity, self._engine, self, lambda facts: None
            )
        except BaseException:
            self._engine.close()
            raise
        self.endpoint.hello["data"] = False
        self._reachability = OwnAddresses(self.settings, self.endpoint, self.dht)
        if maps_port:
            self._reachability.map_port(wished=wished)
            await self._reachability.mapped()
        relay_bps = self.settings.relay_bps or 0.0
        self.introductions = Introductions(self.endpoint, lambda: relay_bps, lambda: False)
        self.view = View(self.dht, self.settings.run_id, credentials=self.settings.membership)
        self.view.on_revoked = self._revoked
        info = PeerInfo(
            self.identity.peer_id, tuple(self.addresses()), role="watcher", name=self.settings.label
        )
        await self.view.announce(info)
        if not self.view.peers and not self.endpoint.links:
            named = self.settings.initial_addresses
            refusals = await advice.ask(self.endpoint, named, self.settings.run_id)
            if refusals:
                await self.close()
                raise refusals[0]

    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) under which others reach this node, best first."""
        return list(self._reachability.addresses())

    async def close(self) -> None:
        """Leave the run, and free the ports."""
        self.introductions.close()
        try:
            await self.view.leave()
        finally:
            await self._reachability.close()
            await self.endpoint.close()
            await self.dht.stop()
            self._engine.close()

    def _revoked(self, peer_ids: list[bytes]) -> None:
        for peer_id in peer_ids:
            if peer_id in self.endpoint.links:
                self.endpoint.links[peer_id].close("the run's owner has revoked its credentials")

    # EndpointEvents

    def link_up(self, link: Link) -> None:
        """A member is there."""
        self.view.report_alive(link.peer_id)

    def link_down(self, link: Link, reason: str) -> None:
        """It is gone, and with it what was relayed for it."""
        self.introductions.link_down(link)

    def message(self, link: Link, message: dict[str, Any]) -> None:
        """What members ask; what they tell each other of rounds is not for a helper. Raises ProtocolError."""
        self.introductions.message(link, message)
