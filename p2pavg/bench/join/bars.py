"""The bars that joining has to keep on any link, and the figures of a run of `bench join` beside them. Pure.

The measure is the *state's time*: how long the state alone takes over the link, the narrower of what the
donors together send and what a newcomer receives (each of several newcomers, its share of the donors' rate).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from p2pavg.lab.topology import Topology

IN = 2.5  # joining may take this multiple of the state's time, and IN_EPOCHS epochs besides
IN_EPOCHS = 3  # joining may take so many epochs besides, until the newcomer contributes
SENT = 1.5  # the most bytes that a newcomer may receive, in multiples of the state's
SEVERAL = 2.0  # the factor of both bars where several newcomers come at once, and
LOST_SEVERAL = 2.0  # the most training time lost then
KEPT = 0.9  # the least share of its samples/s that a donor keeps, where results fit beside the state
LOST = 1.5  # the most training time lost, in multiples of the state's time, where results do not fit
FITS = 0.5  # the largest share of the link that results may take and still fit

Answer = Mapping[str, Any]


def bars(
    joined: Sequence[Answer],
    trained: Sequence[Answer],
    topology: Topology,
    peers: int,
    epoch_s: float,
    result_bytes: int,
) -> dict[str, Any]:
    """joined, trained, peers: as in `figures`. epoch_s: duration of an epoch before newcomers came.
    result_bytes: of one epoch.
    """
    state_bytes = max(answer["state_bytes"] for answer in joined)
    donors, newcomers = topology.hosts[:peers], topology.hosts[peers : peers + len(joined)]
    egress = sum(topology.nodes[host].egress_mbps for host in donors) / len(joined)
    link_mbps = min(egress, *(topology.nodes[host].ingress_mbps for host in newcomers))
    state_s = 8e-6 * state_bytes / link_mbps
    load = 8e-6 * result_bytes / epoch_s / link_mbps
    in_s = max(answer["in_at"] - answer["began"] for answer in joined)
    received = max(answer["received_bytes"] - answer["result_bytes"] for answer in joined)
    began, end = min(a["began"] for a in joined), max(a["in_at"] for a in joined)
    kept = statistics.fmean(_kept(donor["applied"], began, end) for donor in trained)
    lost_s = max(0.0, 1 - kept) * (end - began)
    times = SEVERAL if len(joined) > 1 else 1.0
    most_lost = LOST_SEVERAL if len(joined) > 1 else LOST
    fits = load <= FITS
    return {
        "link_mbps": link_mbps,
        "state_s": state_s,
        "result_load": load,
        "in_s": in_s,
        "in_bar_s": times * (IN * state_s + IN_EPOCHS * epoch_s),
        "sent_over_state": received / state_bytes,
        "sent_bar": times * SENT,
        "results_fit": fits,
        "kept": kept,
        "lost_over_state": lost_s / state_s,
        "donors_bar": f">= {KEPT} kept" if fits else f"<= {most_lost} lost",
        "within": {
            "in": in_s <= times * (IN * state_s + IN_EPOCHS * epoch_s),
            "sent": received <= times * SENT * state_bytes,
            "donors": kept >= KEPT if fits else lost_s <= most_lost * state_s,
        },
    }


def _kept(applied: Sequence[Answer], began: float, end: float) -> float:
    """The share of its samples/s that a donor kept from `began` to `end`: samples are where they were
    counted.
    """
    counted: list[float] = [at for epoch in applied for at in epoch["counted_at"]]
    before = applied[2]["at"]  # without the epochs of its own start

    def rate(since: float, until: float) -> float:
        return sum(since < at <= until for at in counted) / (until - since)

    return rate(began, end) / rate(before, began)
