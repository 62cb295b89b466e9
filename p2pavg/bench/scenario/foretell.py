"""What the laws of `p2pavg predict` say of a replay, from the lab's network alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.bench.scenario.replay import Sleeper, Training
from p2pavg.forecast.laws import PAYLOAD, EpochForecast, LinkProfile, PeerProfile, Swarm, Workload, epoch
from p2pavg.lab.topology import Topology

_FASTEST_MBPS = 1e6  # where a path has no limit


def foretell(
    network: Topology,
    sleepers: Sequence[Sleeper],
    training: Training,
) -> EpochForecast:
    """An epoch of these peers. network: has their hosts."""
    members = [
        PeerProfile(
            sleeper.host,
            sleeper.region,
            sleeper.sps,
            _bytes(network.nodes[sleeper.host].egress_mbps),
            _bytes(network.nodes[sleeper.host].ingress_mbps),
        )
        for sleeper in sleepers
    ]
    links = {
        (i, j): LinkProfile(
            network.rtt_ms(one.host, other.host) / 1e3,
            _bytes(min(network.rate_mbps(one.host, other.host), _FASTEST_MBPS)) or 0.0,
        )
        for i, one in enumerate(sleepers)
        for j, other in enumerate(sleepers)
        if i != j
    }
    job = Workload(
        training.target,
        training.values,
        training.compression,
        training.compression,
        delayed=training.delayed,
    )
    return epoch(job, Swarm(members, links))


def _bytes(mbps: float) -> float | None:
    """Of payload, a second; None: no limit."""
    return PAYLOAD * mbps * 1e6 / 8 or None
