"""Watcher: watches a run over links without data streams. A watcher contributes nothing and has no record."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from p2pavg.credentials import Credentials
from p2pavg.errors import ConfigurationError, CredentialError, P2PAvgError
from p2pavg.identity import Identity
from p2pavg.membership import DHT, PeerInfo, View
from p2pavg.membership.table.address import Address, wildcard
from p2pavg.monitor.picture import Picture
from p2pavg.peer.dialling import DIAL_TIMEOUTS_S, Dialler
from p2pavg.rounds.measure.status import WATCH
from p2pavg.transport.engine import NoEvents
from p2pavg.transport.links.endpoint import Endpoint
from p2pavg.transport.links.link import Link, Message
from p2pavg.transport.python.engine import PythonEngine

logger = logging.getLogger("p2pavg.monitor")

MOST_LINKS = 32


class Watcher:
    """Feeds a picture with records, links and messages. Runs on the current event loop."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._refused: dict[bytes, P2PAvgError] = {}
        self._closed = False

    async def start(self, initial_peers: Sequence[Address], credentials: Credentials | None) -> None:
        """Find the run. Raises UnreachableError when none of initial_peers answers, CredentialError."""
        if not initial_peers:
            raise ConfigurationError("no way into the swarm; name any member with --initial-peers host:port")
        run_id = self.picture.run_id
        if credentials is not None and credentials.run_id != run_id:
            raise CredentialError(f"these credentials are for run {credentials.run_id!r}, not {run_id!r}")
        identity = Identity.generate() if credentials is None else credentials.identity
        self._engine = PythonEngine(NoEvents())
        self._endpoint = await Endpoint.start(
            identity,
            run_id=run_id,
            listen_host="127.0.0.1",
            listen_port=0,
            port_is_default=False,
            engine=self._engine,
            hello={"schema": b"", "role": "watcher", "client_only": True, "data": False},
            streams=1,
            events=self,
            credentials=credentials,
        )
        try:
            self._dht = await DHT.start(
                identity, host=wildcard(), port=0, initial_peers=initial_peers, client_only=True
            )
        except BaseException:
            await self._endpoint.close()
            self._engine.close()
            raise
        self._view = View(self._dht, run_id, credentials=credentials)
        self._dialler = Dialler(
            self._endpoint,
            self._view,
            self._refused.__setitem__,
            lambda peers: None,
            most=MOST_LINKS,
            skip=self._refused,
        )
        self._view.on_change = self._changed
        await self._view.refresh_now()
        self._changed()
        if not self._view.peers:
            await self._ask(initial_peers)

    async def _ask(self, initial_peers: Sequence[Address]) -> None:
        """Ask the initial peers, as nobody of the run is in view: the run may be closed, or open while we
        have credentials.
        """
        for host, port in initial_peers:
            try:
                await self._endpoint.connect(host, port, timeout=DIAL_TIMEOUTS_S[-1])
            except CredentialError:
                await self.close()
                raise
            except (P2PAvgError, OSError, TimeoutError) as error:
                logger.debug("%s:%d is no member of this run: %s", host, port, error)

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._dialler.close()
        self._view.close()
        await self._endpoint.close()
        await self._dht.stop()
        self._engine.close()

    @property
    def members(self) -> list[PeerInfo]:
        """The records of the run that the table holds now."""
        return list(self._view.peers.values())

    def quiet_s(self, member: PeerInfo) -> float:
        """Seconds since one of the members last said that it is there."""
        return self._view.quiet_s(member.peer_id)

    def refusal(self) -> P2PAvgError | None:
        """Why all members refuse to be watched; None: one does not."""
        if self._endpoint.links or not self._refused or not self._refused.keys() >= self._view.peers.keys():
            return None
        return next(iter(self._refused.values()))

    # ------------------------------------------------------------------------------- members come and go

    def _changed(self) -> None:
        self.picture.listed(self._view.peers, time.monotonic())
        self._dialler.look()

    # ------------------------------------------------------------------------------------ EndpointEvents

    def link_up(self, link: Link) -> None:
        """Ask the member for status, events and reports."""
        self._view.report_alive(link.peer_id)
        self.picture.linked(link.peer_id, time.monotonic())
        link.send({"t": WATCH})

    def link_down(self, link: Link, reason: str) -> None:
        """Take note that the member died, left, or cannot be reached."""
        self._view.report_dead(link.peer_id)
        self._dialler.link_down(link)
        self.picture.unlinked(link.peer_id, reason, time.monotonic())
        self._changed()

    def message(self, link: Link, message: Message) -> None:
        """Hand a member's message to the picture."""
        self.picture.told(link.peer_id, message, time.monotonic())
