"""Port mapping: a gateway is asked to lead a port of its outside address here, and asked again in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from p2pavg.membership.reach.leases import GatewayRefusal, Lessor, Mapped

logger = logging.getLogger("p2pavg.membership")

RENEW_SHARE = 0.5  # of the lease: the latest renewal, as both RFCs ask
LEAST_RENEW_S = 4.0  # the soonest, however short the lease, as RFC 6887 asks
LOOK_S = 15.0  # asked again so often, since gateways restart and providers change addresses
REFUSED_LOOK_S = 120.0  # the same, of a gateway that gives no port
CLOSE_S = 1.0  # that a gateway has to take the port back


class PortMapping:
    """Keeps one port mapped for as long as it runs, under TCP and UDP alike.

    changed: called with (address, port) when the mapping is there or moved, and with None when it is lost.
    """

    def __init__(
        self,
        lessor: Lessor,
        port: int,
        changed: Callable[[tuple[str, int] | None], None],
        look_s: float = LOOK_S,
    ) -> None:
        self._lessor = lessor
        self._look_s = look_s
        self._port = port
        self._changed = changed
        self._where: tuple[str, int] | None = None
        self._left: dict[str, int] = {}  # by protocol, the outside port that may be given, and is not removed
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Ask for the mapping, and keep it from then on. Raises GatewayRefusal when there is none now; it is
        asked for again all the same.
        """
        try:
            mapped = await self._both(self._port)
        except GatewayRefusal:
            self._task = asyncio.get_running_loop().create_task(self._keep(None))
            raise
        self._where = (mapped.address, mapped.port)
        self._changed(self._where)
        self._task = asyncio.get_running_loop().create_task(self._keep(mapped))
        return self._where

    async def _both(self, wanted: int) -> Mapped:
        """The same outside port for both; the data connections' is the one that matters."""
        mapped = await self._lease("tcp", wanted)
        try:
            other = await self._lease("udp", mapped.port)
            if other.port != mapped.port:
                await self._remove("udp")
        except GatewayRefusal as refusal:
            logger.debug("no mapping for UDP: %s", refusal)
        return mapped

    async def _lease(self, protocol: str, wanted: int) -> Mapped:
        """Whoever ends this wait leaves a mapping behind, perhaps, which `close` removes."""
        before = self._left.get(protocol)
        self._left[protocol] = wanted if before is None else before
        try:
            mapped = await self._lessor.lease(protocol, self._port, wanted)
            if not (mapped.lease_s and mapped.port):
                raise GatewayRefusal("the gateway gives no port, or gives it for no time at all")
        except GatewayRefusal:
            if before is None:
                del self._left[protocol]
            raise
        self._left[protocol] = mapped.port
        return mapped

    async def _remove(self, protocol: str) -> None:
        await self._lessor.lease(protocol, self._port, self._left[protocol], 0)
        del self._left[protocol]

    async def _keep(self, mapped: Mapped | None) -> None:
        now = asyncio.get_running_loop().time
        ends = now() + (mapped.lease_s if mapped is not None else 0.0)
        while True:
            await asyncio.sleep(
                max(self._look_s, REFUSED_LOOK_S)
                if mapped is None
                else min(self._look_s, max(LEAST_RENEW_S, RENEW_SHARE * mapped.lease_s))
            )
            try:
                mapped = await self._both(self._where[1] if self._where else self._port)
            except GatewayRefusal as refusal:
                if self._where is not None and now() >= ends:
                    logger.warning("the mapped port is lost: %s", refusal)
                    mapped = self._where = None
                    self._changed(None)
                continue
            ends = now() + mapped.lease_s
            if (mapped.address, mapped.port) != self._where:
                self._where = (mapped.address, mapped.port)
                self._changed(self._where)

    async def close(self) -> None:
        """Stop renewing, and give the port back, also one whose answer is still on its way. Takes a second at
        most.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(self._remove, self._left), return_exceptions=True)
