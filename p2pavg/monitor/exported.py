"""What a monitor shows, as values of metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.identity import short_id
from p2pavg.metrics.catalogue import Values
from p2pavg.monitor.shown import PeerShown, Shown
from p2pavg.report import PHASES

Rows = Sequence[tuple[tuple[str, ...], float]]


def values(shown: Shown) -> Values:
    """Values under the names that peers export their own by, so that a dashboard takes either."""
    run = shown.run_id
    whole = (run, "")
    told: dict[str, float | None] = {
        "p2pavg_epoch": shown.epoch,
        "p2pavg_epochs_total": shown.epochs_ended,
        "p2pavg_samples_total": shown.samples_counted,
        "p2pavg_failed_attempts_total": shown.attempts_failed,
        "p2pavg_samples_per_second": shown.samples_per_second,
        "p2pavg_epoch_usual_seconds": shown.usual_epoch_s,
        "p2pavg_epoch_age_seconds": shown.epoch_age_s,
        "p2pavg_peers": sum(_works(peer) for peer in shown.peers),
        "p2pavg_loss": shown.loss,
        "p2pavg_data_passes": shown.passes,
        "p2pavg_data_blocks": shown.blocks_consumed,
        "p2pavg_dollars_per_hour": shown.dollars_per_hour,
    }
    found = {name: [(whole, float(value))] for name, value in told.items() if value is not None}
    peers = [((run, _short(peer.peer)), peer) for peer in shown.peers]
    of_peers: dict[str, Rows] = {
        "p2pavg_peer_info": [
            ((*labels, peer.label, peer.region, peer.reach, peer.version), 1.0) for labels, peer in peers
        ],
        "p2pavg_peer_up": [(labels, float(_works(peer))) for labels, peer in peers],
        "p2pavg_peer_samples_per_second": [(labels, peer.samples_per_second) for labels, peer in peers],
        "p2pavg_peer_samples_discarded_total": [
            (labels, float(peer.samples_discarded)) for labels, peer in peers
        ],
        "p2pavg_peer_memory_bytes": [(labels, float(peer.memory_bytes)) for labels, peer in peers],
        "p2pavg_peer_device_memory_bytes": [
            (labels, float(peer.device_memory_bytes)) for labels, peer in peers
        ],
        "p2pavg_peer_sent_bytes_total": [(labels, float(peer.bytes_sent)) for labels, peer in peers],
        "p2pavg_peer_received_bytes_total": [(labels, float(peer.bytes_received)) for labels, peer in peers],
        "p2pavg_peer_relayed_bytes_total": [(labels, float(peer.relayed_bytes)) for labels, peer in peers],
        "p2pavg_peer_phase_seconds_total": [
            ((*labels, phase), seconds)
            for labels, peer in peers
            for phase, seconds in zip(PHASES, peer.phase_seconds, strict=True)
        ],
    }
    links = [((run, _short(link.peer), _short(link.other)), link) for link in shown.links]
    of_links: dict[str, Rows] = {
        "p2pavg_link_round_trip_seconds": [(labels, link.rtt_s) for labels, link in links],
        "p2pavg_link_streams": [(labels, float(link.streams)) for labels, link in links],
        "p2pavg_link_bytes_per_second": [(labels, link.rate_bps / 8) for labels, link in links],
    }
    return {**found, **of_peers, **of_links}


def _works(peer: PeerShown) -> bool:
    return peer.state not in ("gone", "silent")


def _short(peer: str) -> str:
    return short_id(bytes.fromhex(peer))
