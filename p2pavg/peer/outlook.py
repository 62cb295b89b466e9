"""Outlook: what this peer tells of itself to watchers, to whoever reads its metrics, and to its user."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.metrics.exporter import Exporter
from p2pavg.metrics.own import OwnMetrics
from p2pavg.peer.settings import Settings
from p2pavg.report import RoundReport
from p2pavg.report.status import Status
from p2pavg.rounds.loop.driver import Driver
from p2pavg.rounds.measure.status import Watching, status


class Outlook:
    """The last report, the watchers, and the metrics of one peer. On the loop thread."""

    def __init__(
        self,
        settings: Settings,
        peer_id: bytes,
        publish: Callable[[RoundReport], None],
        company: Callable[[], int],
    ) -> None:
        """company: returns how many others train."""
        self._settings = settings
        self._publish = publish
        self._company = company
        self.last: RoundReport | None = None
        self.watching = Watching(self._status)
        own = OwnMetrics(settings.run_id, peer_id, settings.label)
        self._exporter = Exporter(settings.metrics_place, own, self._stands)
        self._driver: Driver | None = None
        self._reach: Callable[[], str] = str
        self._relayed: Callable[[], int] = int

    async def start(self) -> None:
        """Serve the metrics."""
        await self._exporter.start()

    async def close(self) -> None:
        """Serve no metrics any more."""
        await self._exporter.close()

    def trains(self, driver: Driver, reach: Callable[[], str], relayed: Callable[[], int]) -> None:
        """This peer trains now. reach: returns how others reach it, in words; relayed: the bytes that it
        carried for others.
        """
        self._driver, self._reach, self._relayed = driver, reach, relayed

    def finished(self, report: RoundReport) -> None:
        """Keep and hand out the report of an epoch."""
        self.last = report
        self.watching.report(report)
        self._exporter.add(report)
        self._publish(report)

    def _status(self) -> Status:
        """The status that watchers are told each second."""
        driver = self._driver
        assert driver is not None
        return status(
            driver.machine,
            driver.recorder.links(),
            self.last,
            region=self._settings.region or "",
            reach=self._reach(),
            moving=driver.moving,
            relayed=self._relayed(),
        )

    def _stands(self) -> tuple[Status | None, int]:
        """The status, once this peer trains, and how many do."""
        return None if self._driver is None else self._status(), 1 + self._company()
