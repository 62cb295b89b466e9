"""The port of this peer's gateway that leads here, where the gateway is asked for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from p2pavg.errors import ConfigurationError
from p2pavg.membership.reach.gateway import default_gateway
from p2pavg.membership.reach.leases import GatewayRefusal
from p2pavg.membership.reach.lessors import Lessors
from p2pavg.membership.reach.port_mapping import PortMapping
from p2pavg.membership.table.address import Address, is_loopback, primary_address
from p2pavg.networks import is_public

logger = logging.getLogger("p2pavg.peer.peer")

PATIENCE_S = 1.0  # that a newcomer waits for its gateway, before others try whether they reach it


class Mapping:
    """`where` is the address that leads here; None: there is none, or none yet."""

    def __init__(
        self, port: int, changed: Callable[[Address | None], None], *, wished: bool, secret: bytes = b""
    ) -> None:
        """changed: told where the port leads from, and None when it leads here no more. wished: the user
        asked for it, and is told when the gateway refuses. secret: as of `Gateway`.
        """
        self._ports = PortMapping(Lessors(secret=secret), port, changed)
        self._wished = wished
        self._first: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask for the port, and keep it."""
        self._first = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            host, port = await self._ports.start()
            logger.info("the gateway leads %s:%d here", host, port)
        except GatewayRefusal as refusal:
            level = logging.WARNING if self._wished else logging.DEBUG
            logger.log(
                level,
                "no port is mapped: %s; open or forward the port by hand, or leave out map_port",
                refusal,
            )

    async def settled(self) -> None:
        """Until the gateway has answered, or takes longer than a newcomer can wait."""
        if self._first is not None:
            await asyncio.wait([self._first], timeout=PATIENCE_S)

    async def close(self) -> None:
        """Give the port back."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.wait([self._first])
        await self._ports.close()


def is_of_use(host: str, *, wished: bool) -> bool:
    """Whether a gateway is to be asked, by a peer that listens on `host`.

    Raises ConfigurationError when the user wishes it where there is nobody to ask.
    """
    own = primary_address() if host in ("0.0.0.0", "::") else host
    if own is not None and not is_loopback(own) and not is_public(own) and default_gateway() is not None:
        return True
    if wished and (own is None or not is_public(own)):
        why = "it listens on loopback alone" if is_loopback(host) else "no default route leads to a gateway"
        raise ConfigurationError(
            f"map_port=True has no gateway to ask: {why}; leave map_port out, and open the port by hand "
            "where it is needed"
        )
    return False
