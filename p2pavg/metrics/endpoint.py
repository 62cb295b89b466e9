"""The port at which a peer's metrics are scraped: GET /metrics, over as little HTTP as that takes.

It runs on the event loop, one request a connection, few connections at once and each for seconds at most: a
scraper that hangs costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from p2pavg.errors import AddressInUseError
from p2pavg.forkguard import guard
from p2pavg.metrics.exposition import CONTENT_TYPE

logger = logging.getLogger("p2pavg.metrics")

MOST_REQUEST = 8192  # bytes
MOST_CONNECTIONS = 8
PATIENCE_S = 5.0
BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class MetricsEndpoint:
    """Answers scrapes. Runs on the current event loop."""

    def __init__(self, text: Callable[[], bytes]) -> None:
        self._text = text
        self._open = 0
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises AddressInUseError when that cannot be."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = guard(socket.create_server((host, port), family=family))
        except OSError as error:
            raise AddressInUseError(
                f"metrics cannot be served at {host}:{port} ({error.strerror or error}); "
                "name a free port of this machine in metrics="
            ) from None
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=MOST_REQUEST)
        self.port = self._socket.getsockname()[1]

    async def close(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= MOST_CONNECTIONS:
            writer.close()
            return
        self._open += 1
        try:
            with contextlib.suppress(*BROKEN):
                async with asyncio.timeout(PATIENCE_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(request))
                    await writer.drain()
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        method, path, *_ = [*request.split(b"\r\n")[0].split(b" "), b"", b""]
        if method != b"GET" or path.partition(b"?")[0] not in (b"/", b"/metrics"):
            return _http("404 Not Found", "text/plain; charset=utf-8", b"metrics are at /metrics\n")
        return _http("200 OK", CONTENT_TYPE, self._text())


def _http(status: str, kind: str, body: bytes) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + body
