"""The addresses under which others open connections to this peer, and whether they can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from p2pavg.membership.reach.leases import SECRET
from p2pavg.membership.table.address import Address, is_loopback
from p2pavg.membership.table.dht import DHT
from p2pavg.peer.mapping import Mapping
from p2pavg.peer.settings import Settings
from p2pavg.transport.links.endpoint import Endpoint

logger = logging.getLogger("p2pavg.peer.peer")


class OwnAddresses:
    """`client_only` tells whether nobody can open a connection to this peer."""

    def __init__(
        self, settings: Settings, endpoint: Endpoint, dht: DHT, changed: Callable[[], None] = lambda: None
    ) -> None:
        """changed: called when others reach this peer in another way than they were told."""
        self.client_only = bool(settings.client_only)
        self._settled = self.client_only or bool(settings.announced)  # the user knows
        self._changed = changed
        self._learned = False
        self._looking: asyncio.Task[None] | None = None
        self._announced = settings.announced
        self._endpoint = endpoint
        self._dht = dht
        self._mapping: Mapping | None = None

    def map_port(self, *, wished: bool) -> None:
        """Ask the gateway of this network for a port. wished: as in `Mapping`."""
        secret = self._dht.identity.secret(SECRET)
        self._mapping = Mapping(self._endpoint.port, self._mapped, wished=wished, secret=secret)
        self._mapping.start()

    def _mapped(self, where: Address | None) -> None:
        """The gateway leads another port here, or none: the view announces it with the others. Whoever was
        out of reach may be reached now, and the other way round.
        """
        self._dht.mapped = where
        if self._learned and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def addresses(self) -> Sequence[Address]:
        """(host, port) under which others reach this peer, best first."""
        if self._announced:
            return self._announced
        return self._dht.external_addresses()

    def in_words(self) -> str:
        """How others open connections to this peer, in a word for people."""
        if self.client_only:
            return "outgoing only"
        if self._announced:
            return "announced"
        return "direct" if self._dht.mapped is None else "mapped"

    def is_here(self, host: str) -> bool:
        """Whether an address is one of this machine."""
        return is_loopback(host) or any(host == own for own, _ in self.addresses())

    async def mapped(self) -> None:
        """Wait until the gateway has answered, but no longer than a newcomer can."""
        if self._mapping is not None:
            await self._mapping.settled()

    async def learn(self) -> None:
        """Become client_only, with a warning, when others cannot open a connection to this peer."""
        if self._settled:
            return
        await self.mapped()
        await self._look()
        self._learned = True

    async def _look(self) -> None:
        found = await self._dht.check_reachability()
        if found.reachable is None or found.reachable is not self.client_only:
            return
        self.client_only = not found.reachable
        if self.client_only:
            logger.warning("%s", found.advice)
            self._dht.become_client_only()
        else:
            logger.info("others open connections to this peer now, at %s:%d", *self.addresses()[0])
            self._dht.become_reachable(self._endpoint.port)
        self._endpoint.hello["client_only"] = self.client_only
        self._changed()

    async def close(self) -> None:
        """Give the mapped port back."""
        if self._looking is not None:
            self._looking.cancel()
        if self._mapping is not None:
            await self._mapping.close()
