"""OwnMetrics: what one peer exports of itself, from its reports and its status. Pure: time is a parameter."""

from __future__ import annotations

import statistics
from collections import Counter, deque

from p2pavg.identity import short_id
from p2pavg.metrics.catalogue import Values
from p2pavg.report import PHASES, RoundReport
from p2pavg.report.status import Status

USUAL_OF = 16  # epochs
PACE_S = 30.0  # seconds of epochs over which rates are averaged


class OwnMetrics:
    """Counts what the reports say. Use from one thread."""

    def __init__(self, run_id: str, peer: bytes, name: str) -> None:
        self._labels = (run_id, short_id(peer))
        self._name = name
        self._counts: Counter[str] = Counter()
        self._phases: Counter[str] = Counter()
        self._last: deque[RoundReport] = deque(maxlen=USUAL_OF)
        self._ended_at: float | None = None

    def add(self, report: RoundReport, now: float) -> None:
        """Take the report of an epoch."""
        counts = self._counts
        counts["p2pavg_peer_samples_discarded_total"] += report.samples_discarded
        counts["p2pavg_peer_sent_bytes_total"] += report.wire_bytes_sent
        counts["p2pavg_peer_received_bytes_total"] += report.wire_bytes_received
        counts["p2pavg_failed_attempts_total"] += max(0, report.attempts - 1)
        if not report.members:
            return  # the last report of a peer that leaves: no round ended with it
        counts["p2pavg_epochs_total"] += 1
        counts["p2pavg_samples_total"] += report.samples
        for phase in PHASES:
            self._phases[phase] += getattr(report, f"seconds_{phase}")
        self._last.append(report)
        self._ended_at = now

    def values(self, status: Status | None, peers: int, now: float) -> Values:
        """The values at a time. status: None: this peer does not train yet. peers: that train, this one
        included.
        """
        mine = self._labels
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {
            name: [(mine, float(self._counts[name]))] for name in COUNTED
        }
        found["p2pavg_peer_phase_seconds_total"] = [((*mine, name), self._phases[name]) for name in PHASES]
        found["p2pavg_peer_up"] = [(mine, 1.0)]
        found["p2pavg_peers"] = [(mine, float(peers))]
        if self._ended_at is not None:
            last, recent = list(self._last), self._recent()
            seconds = sum(one.seconds_total for one in recent)
            told = {
                "p2pavg_epoch_usual_seconds": statistics.median(one.seconds_total for one in last),
                "p2pavg_epoch_age_seconds": max(0.0, now - self._ended_at),
                "p2pavg_samples_per_second": _per(sum(one.samples for one in recent), seconds),
                "p2pavg_peer_samples_per_second": _per(sum(one.local_samples for one in recent), seconds),
            }
            found |= {name: [(mine, value)] for name, value in told.items()}
        if status is not None:
            found |= self._standing(status)
        return found

    def _standing(self, status: Status) -> dict[str, list[tuple[tuple[str, ...], float]]]:
        mine = self._labels
        about = (*mine, self._name, status.region, status.reach, status.version)
        links = [((*mine, short_id(link.peer)), link) for link in status.links]
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "p2pavg_epoch": [(mine, float(status.epoch))],
            "p2pavg_data_passes": [(mine, status.passes)],
            "p2pavg_data_blocks": [(mine, float(status.blocks_consumed))],
            "p2pavg_peer_info": [(about, 1.0)],
            "p2pavg_peer_memory_bytes": [(mine, float(status.memory))],
            "p2pavg_peer_device_memory_bytes": [(mine, float(status.device_memory))],
            "p2pavg_peer_relayed_bytes_total": [(mine, float(status.relayed))],
            "p2pavg_link_round_trip_seconds": [(labels, link.rtt_s) for labels, link in links],
            "p2pavg_link_streams": [(labels, float(link.streams)) for labels, link in links],
            "p2pavg_link_bytes_per_second": [(labels, link.rate_bps / 8) for labels, link in links],
        }
        return found if status.loss is None else found | {"p2pavg_loss": [(mine, status.loss)]}

    def _recent(self) -> list[RoundReport]:
        """The last epochs, of PACE_S seconds and one at least."""
        found: list[RoundReport] = []
        for report in reversed(self._last):
            found.append(report)
            if sum(one.seconds_total for one in found) >= PACE_S:
                break
        return found


COUNTED = (
    "p2pavg_epochs_total",
    "p2pavg_samples_total",
    "p2pavg_failed_attempts_total",
    "p2pavg_peer_samples_discarded_total",
    "p2pavg_peer_sent_bytes_total",
    "p2pavg_peer_received_bytes_total",
)


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
