"""The TCP port of a node that only keeps the table, and has no links."""

from __future__ import annotations

import asyncio
import logging

from p2pavg.errors import P2PAvgError
from p2pavg.membership.table.carrying.streams import HEAD_BYTES, Take, is_head
from p2pavg.transport.links import listening, raw_socket
from p2pavg.transport.links.carried import Carried, CountedSocket

logger = logging.getLogger("p2pavg.transport")


class TablePort:
    """Listens, and passes connections of the table on."""

    def __init__(self, host: str, port: int) -> None:
        """Raises AddressInUseError, ConfigurationError."""
        self._table: Take | None = None
        sock = listening.bind(host, port, port_is_default=False)
        self._listener = listening.Listener(sock, self._welcome, Carried())
        self.port = self._listener.port

    def attach(self, table: Take) -> None:
        """What takes the connections; till then they are closed."""
        self._table = table

    async def _welcome(self, sock: CountedSocket) -> None:
        try:
            async with asyncio.timeout(raw_socket.HANDSHAKE_S):
                raw = await raw_socket.receive(sock, HEAD_BYTES)
        except (P2PAvgError, OSError, TimeoutError) as error:
            logger.debug("a connection ended before it said what it is: %s", error)
            raw = b""
        if self._table is None or not is_head(raw):
            sock.close()
            return
        await self._table(sock, raw)

    async def close(self) -> None:
        """Listen no more; connections that were passed on stay."""
        await self._listener.close()
