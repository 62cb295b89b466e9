"""The addresses under which others open connections to this peer, and whether they can."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from p2pavg.membership.reach.leases import SECRET
from p2pavg.membership.table.address import Address, is_loopback, is_numeric, resolve
from p2pavg.membership.table.dht import DHT
from p2pavg.membership.table.dialling_back import Reachability
from p2pavg.peer.mapping import Mapping
from p2pavg.peer.settings import Settings
from p2pavg.transport.links.endpoint import Endpoint

logger = logging.getLogger("p2pavg.peer.peer")

AGAIN_S = 300.0  # between two looks, however quiet it is: a port may be opened, or shut
SOON_S = 12.0  # to the look that confirms one: others remember for ten seconds what they found
FIRST_PAUSE_S = 1.0  # between looks while nobody can tell; it doubles with each


class OwnAddresses:
    """`client_only` tells whether nobody can open a connection to this peer. What a user says stands; else
    others try: when this peer joins, when it moves, and now and then.
    """

    def __init__(
        self, settings: Settings, endpoint: Endpoint, dht: DHT, changed: Callable[[], None] = lambda: None
    ) -> None:
        """changed: called when others reach this peer in another way than they were told."""
        self.client_only = bool(settings.client_only)
        self._settled = self.client_only or bool(settings.announced)  # the user knows
        self._changed = changed
        self._learned = False
        self._looking: asyncio.Task[None] | None = None
        self._moved = False  # since the last look
        self._doubted = False  # the last look contradicts what holds
        self._next_look = 0.0
        self._pause = FIRST_PAUSE_S
        self._announced = settings.announced
        self._endpoint = endpoint
        self._dht = dht
        self._mapping: Mapping | None = None
        dht.on_moved = self.moved

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
        self.moved()

    def moved(self) -> None:
        """This machine's addresses changed, or what others see of them: others are to try again."""
        self._moved = True
        self._pause = FIRST_PAUSE_S
        self._next_look = min(self._next_look, time.monotonic())

    def beat(self) -> None:
        """Begin a look that is due. Called several times a second."""
        busy = self._looking is not None and not self._looking.done()
        if self._learned and not busy and time.monotonic() >= self._next_look:
            self._looking = asyncio.get_running_loop().create_task(self._look_again())

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
        mapped = self._dht.mapped
        return "direct" if mapped is None or self.addresses()[0][1] != mapped[1] else "mapped"

    def is_here(self, host: str) -> bool:
        """Whether an address is one of this machine."""
        return is_loopback(host) or any(host == own for own, _ in self.addresses())

    async def mapped(self) -> None:
        """Wait until the gateway has answered, but no longer than a newcomer can."""
        if self._mapping is not None:
            await self._mapping.settled()

    async def _look_up(self) -> None:
        """Warn of announced names that have no address, as far as this machine knows."""
        for host, port in self._announced:
            if not await resolve(host, port):
                logger.warning(
                    "announce= names %s, which has no address here: where others find none either, they "
                    "cannot open connections to this peer; write its name right, or its numeric address",
                    host,
                )

    async def learn(self) -> None:
        """Become client_only, with a warning, when others cannot open a connection to this peer."""
        if self._settled:
            if not all(is_numeric(host) for host, _ in self._announced):
                self._looking = asyncio.get_running_loop().create_task(self._look_up())
            return
        await self.mapped()
        if self._dht.mapped is not None:
            await (
                self._dht.reviewed()
            )  # its questions come from another port now, and who was asked is to know
        self._moved = False
        found = await self._dht.check_reachability(in_haste=True)
        self._judge(found)
        self._after(found, moved=found.reachable is None)
        self._learned = True

    async def _look_again(self) -> None:
        moved, pause = self._moved, self._pause
        if moved:
            await self._dht.reviewed()
        self._moved, self._pause = False, pause  # what the review found belongs to this look
        before = self.addresses()
        found = await self._dht.check_reachability()
        # A try may fail by itself: one that contradicts what holds counts after a move, or the second time.
        doubted, self._doubted = self._doubted, found.reachable is False and not self.client_only
        if found.reachable or moved or doubted:
            self._judge(found)
        if self.addresses() != before:
            self._changed()
        self._after(found, moved=moved)

    def _after(self, found: Reachability, *, moved: bool) -> None:
        """Set when the next look is."""
        if found.reachable is None and moved:
            self._moved = True
            pause, self._pause = self._pause, min(2 * self._pause, AGAIN_S)
        else:
            self._pause = FIRST_PAUSE_S
            pause = SOON_S if moved or self._doubted else AGAIN_S
        self._next_look = time.monotonic() + random.uniform(1.0, 1.2) * pause

    def _judge(self, found: Reachability) -> None:
        if found.reachable is None or found.reachable is not self.client_only:
            return
        self._doubted = False
        self.client_only = not found.reachable
        if self.client_only:
            logger.warning("%s", found.advice)
            self._dht.become_client_only()
            self._dht.review_address()  # who only connects out need not be reached where others see it
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
