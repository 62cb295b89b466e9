"""The reports of the engine on their way to the links and to the rounds."""

from __future__ import annotations

from p2pavg.rounds.loop.driver import Driver
from p2pavg.transport.links.endpoint import Endpoint


class EngineReports:
    """Implements `EngineEvents`. Reports that come before there are links, or rounds, concern nobody."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.driver: Driver | None = None

    def stream_closed(self, link: int, stream: int, reason: str) -> None:
        """The endpoint opens the stream again."""
        if self.endpoint is not None:
            self.endpoint.stream_closed(link, stream, reason)

    def job_done(self, transfer: int, digests: tuple[bytes, ...]) -> None:
        """To the rounds."""
        if self.driver is not None:
            self.driver.job_done(transfer, digests)

    def job_refused(self, transfer: int, rank: int, why: str) -> None:
        """To the rounds."""
        if self.driver is not None:
            self.driver.job_refused(transfer, rank, why)

    def blob_chunk(self, transfer: int, chunk: int) -> None:
        """To the rounds."""
        if self.driver is not None:
            self.driver.blob_chunk(transfer, chunk)

    def blob_sent(self, link: int, transfer: int, chunk: int) -> None:
        """To the rounds, which count the chunks of a blob themselves."""
        if self.driver is not None:
            self.driver.blob_sent(link, transfer)
