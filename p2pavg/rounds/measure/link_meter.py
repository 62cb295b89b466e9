"""LinkMeter: what every link moved since the last report, and how it did while gradients flowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from p2pavg.report import LinkReport
from p2pavg.report.distance import Distance, distance
from p2pavg.report.wire import Wire
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.link import Link

RATED_S = 0.05  # shorter than this says nothing of a rate


@dataclass(slots=True)
class _Row:
    link: int
    seen: tuple[int, int] = (0, 0)  # traffic of this link when last looked at
    sent: int = 0  # since the last report, over all links to the peer
    received: int = 0
    streams: int = 0
    window_bytes: int = 0
    rate_bps: float = 0.0
    mark: tuple[float, int, int] | None = None  # when gradients began to flow, or a rate was last taken
    retransmits: int = 0
    wire: Wire = field(default_factory=Wire)
    rtt_s: float = 0.0
    distance: Distance = Distance.WORLD
    region: str = ""  # of the other peer
    last: LinkReport | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """Everything that left or reached this peer since the last report."""

    links: tuple[LinkReport, ...]
    table: Wire
    others: Wire


class LinkMeter:
    """Runs on the loop thread; looks at the links at every beat."""

    def __init__(
        self,
        engine: Engine,
        region: str,
        is_here: Callable[[str], bool],
        *,
        carried: Callable[[], Mapping[bytes | None, Wire]],
        table: Callable[[], Wire],
    ) -> None:
        """region: of this peer. is_here: whether an address is one of this machine. carried: by all
        connections so far, by peer; None: to nobody that is known. table: what the table of members has
        moved.
        """
        self._engine = engine
        self._region = region
        self._is_here = is_here
        self._carried = carried
        self._table = table
        self._told: dict[bytes | None, Wire] = {}  # of what was carried
        self._told_table = Wire()
        self._rows: dict[bytes, _Row] = {}

    def observe(self, links: Mapping[bytes, Link], *, moving: bool) -> None:
        """moving: gradients flow now, so that windows and rates mean something."""
        for peer, link in links.items():
            if link.hello.get("role") == "watcher":
                continue
            row = self._rows.get(peer)
            if row is None:
                row = self._rows[peer] = _Row(link.id)
            elif row.link != link.id:
                row.link, row.seen = link.id, (0, 0)
            traffic = self._engine.traffic(link.id)
            row.sent += max(0, traffic[0] - row.seen[0])
            row.received += max(0, traffic[1] - row.seen[1])
            row.seen = traffic
            row.rtt_s = link.rtt
            if moving or row.streams == 0:
                self._look(row)
            row.mark = self._rated(row, time.monotonic()) if moving else None

    def _look(self, row: _Row) -> None:
        stats = self._engine.stats(row.link)
        row.streams = max(row.streams, len(stats))
        row.window_bytes = max(row.window_bytes, max((s.window_bytes for s in stats), default=0))
        row.retransmits = max(row.retransmits, sum(s.retransmits for s in stats))

    def _rated(self, row: _Row, now: float) -> tuple[float, int, int]:
        """Take the rate since the mark, if that is long enough ago; the new mark."""
        if row.mark is None:
            return now, row.sent, row.received
        since, sent, received = row.mark
        if now - since < RATED_S:
            return row.mark
        row.rate_bps = max(row.rate_bps, 8 * max(row.sent - sent, row.received - received) / (now - since))
        return now, row.sent, row.received

    def current(self) -> tuple[LinkReport, ...]:
        """The links as the last report told them, with the round trip of now."""
        return tuple(
            replace(row.last, rtt_s=row.rtt_s) for row in self._rows.values() if row.last is not None
        )

    def report(self, links: Mapping[bytes, Link], seconds: float) -> Moved:
        """What the epoch's report says; counting begins anew.

        seconds: from the first gradient byte to the last; the rate is taken over it when it was short.
        """
        self.observe(links, moving=False)
        others, table = self._untold(), self._table()
        for peer, row in self._classed(links):
            rate = row.rate_bps
            if rate == 0.0 and seconds > 0:
                rate = 8 * max(row.sent, row.received) / seconds
            row.last = LinkReport(
                peer=peer.hex(),
                bytes_sent=row.sent,
                bytes_received=row.received,
                streams=row.streams,
                rtt_s=row.rtt_s,
                window_bytes=row.window_bytes,
                rate_bps=rate,
                distance=row.distance,
                retransmits=row.retransmits,
                wire_bytes_sent=row.wire.sent,
                wire_bytes_received=row.wire.received,
                region=row.region,
            )
        reports = tuple(row.last for row in self._rows.values() if row.last is not None)
        self._rows = {
            peer: _Row(
                row.link,
                row.seen,
                rtt_s=row.rtt_s,
                distance=row.distance,
                region=row.region,
                last=row.last,
            )
            for peer, row in self._rows.items()
            if peer in links
        }
        told, self._told_table = self._told_table, table
        return Moved(reports, table - told, others)

    def _untold(self) -> Wire:
        """Give each row what its peer's connections carried since the last report. The rest of it."""
        told, self._told = self._told, dict(self._carried())
        others = Wire()
        for peer, wire in self._told.items():
            fresh = wire - told.get(peer, Wire())
            row = None if peer is None else self._rows.get(peer)
            if row is None:
                others += fresh
            else:
                row.wire = fresh
        return others

    def _classed(self, links: Mapping[bytes, Link]) -> list[tuple[bytes, _Row]]:
        for peer, row in self._rows.items():
            link = links.get(peer)
            if link is not None:
                region = link.hello.get("region")
                row.region = region if isinstance(region, str) else ""
                row.distance = distance(
                    self._region,
                    row.region,
                    same_host=self._is_here(link.address[0]),
                    rtt_s=row.rtt_s,
                )
        return list(self._rows.items())
