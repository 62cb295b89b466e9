"""Every metric: its name, kind, labels and meaning. Base units, counters end in `_total`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PEER = ("run", "peer")  # peer: the short id of whoever a series is about; of the run as a whole: who tells
INFO = (*PEER, "name", "region", "reach", "version")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    help: str
    labels: tuple[str, ...] = PEER

    @property
    def is_counter(self) -> bool:
        """Whether it only grows while its process lives."""
        return self.name.endswith("_total")


METRICS = (
    # The run, as a peer or the monitor sees it. The monitor's own series have an empty `peer`.
    Metric("p2pavg_epoch", "Number of the epoch under way."),
    Metric("p2pavg_epochs_total", "Epochs that ended with an average."),
    Metric("p2pavg_samples_total", "Samples of all peers in these averages."),
    Metric("p2pavg_failed_attempts_total", "Attempts at an average that failed."),
    Metric("p2pavg_samples_per_second", "Samples of all peers per second, over whole epochs."),
    Metric("p2pavg_epoch_usual_seconds", "Median of how long the last 16 epochs took."),
    Metric("p2pavg_epoch_age_seconds", "Seconds since the last epoch ended."),
    Metric("p2pavg_peers", "Peers that train or download the state."),
    Metric("p2pavg_loss", "The loss as logged in the last epoch."),
    Metric("p2pavg_data_passes", "Passes over the data that are consumed, with a sampler of the swarm."),
    Metric("p2pavg_data_blocks", "Blocks of the data that are consumed, with a sampler of the swarm."),
    Metric("p2pavg_dollars_per_hour", "What all peers and their traffic cost, by the price table."),
    # One peer.
    Metric("p2pavg_peer_info", "1; what a peer is, in its labels.", INFO),
    Metric("p2pavg_peer_up", "1: the peer is at work; 0: it is silent, lost, or has left."),
    Metric("p2pavg_peer_samples_per_second", "Samples of a peer per second, over whole epochs."),
    Metric("p2pavg_peer_samples_discarded_total", "Samples of a peer that are in no average."),
    Metric("p2pavg_peer_memory_bytes", "Memory of a peer's process."),
    Metric("p2pavg_peer_device_memory_bytes", "Memory of accelerators that a peer's process holds."),
    Metric("p2pavg_peer_sent_bytes_total", "IP bytes that a peer sent, as a cloud bills them."),
    Metric("p2pavg_peer_received_bytes_total", "IP bytes that a peer received."),
    Metric("p2pavg_peer_relayed_bytes_total", "Bytes that a peer passed on for others."),
    Metric("p2pavg_peer_phase_seconds_total", "Wall clock of a peer's epochs, by phase.", (*PEER, "phase")),
    # One link, as its end `peer` measures it.
    Metric("p2pavg_link_round_trip_seconds", "Round-trip time of a link.", (*PEER, "other")),
    Metric("p2pavg_link_streams", "Data streams of a link.", (*PEER, "other")),
    Metric("p2pavg_link_bytes_per_second", "Fastest rate of a link in its last epoch.", (*PEER, "other")),
)

Values = Mapping[str, Sequence[tuple[tuple[str, ...], float]]]  # by name: (values of its labels, value)
