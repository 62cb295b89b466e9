"""Exporter: one peer's metrics and their port, or nothing where no port is named."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pavg.metrics.endpoint import MetricsEndpoint
from p2pavg.metrics.exposition import text_of
from p2pavg.metrics.own import OwnMetrics
from p2pavg.report import RoundReport
from p2pavg.report.status import Status


class Exporter:
    """Runs on the event loop."""

    def __init__(
        self,
        where: tuple[str, int] | None,
        own: OwnMetrics,
        stands: Callable[[], tuple[Status | None, int]],
    ) -> None:
        """where: (host, port) to serve at; None: nowhere. stands: returns the peer's status, and how many
        train, it included.
        """
        self._where = where
        self._own = own
        self._stands = stands
        self._endpoint = MetricsEndpoint(self._text)

    async def start(self) -> None:
        """Listen. Raises AddressInUseError."""
        if self._where is not None:
            await self._endpoint.start(*self._where)

    @property
    def port(self) -> int:
        """Where it listens; 0: nowhere."""
        return self._endpoint.port

    def add(self, report: RoundReport) -> None:
        """Take the report of an epoch."""
        if self._where is not None:
            self._own.add(report, time.monotonic())

    def _text(self) -> bytes:
        status, peers = self._stands()
        return text_of(self._own.values(status, peers, time.monotonic()))

    async def close(self) -> None:
        """Stop listening."""
        if self.port:
            await self._endpoint.close()
