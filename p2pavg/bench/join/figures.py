"""The figures of `bench join`, from the answers of its processes. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from p2pavg.lab.topology import Topology

Answer = dict[str, Any]
WARM_UP_EPOCHS = 3


def figures(
    joined: Sequence[Answer], trained: Sequence[Answer], topology: Topology | None, peers: int
) -> dict[str, Any]:
    """joined: the answer of each newcomer; trained: that of each donor that lived; peers: the number of
    donors at first, which are on the first hosts.

    `seconds` count from a newcomer's start to its loaded state, `transfer_seconds` from the manifests to the
    last chunk. A donor's samples/s are those of whole epochs: the epochs before newcomers came, and the
    epochs in which a newcomer joined and none contributed yet, as more peers make shorter epochs (None: there
    was none).
    """
    slowest = max(joined, key=lambda answer: answer["loaded_at"] - answer["began"])
    began = min(answer["began"] for answer in joined)
    loaded_at = max(answer["loaded_at"] for answer in joined)
    before = [_epochs(donor, float("-inf"), began)[WARM_UP_EPOCHS:] for donor in trained]
    alone = min(_first(answer) for answer in joined)
    during = [[e for e in _epochs(donor, began, loaded_at) if e["epoch"] < alone] for donor in trained]
    ratios = [_rate(d) / _rate(b) for b, d in zip(before, during, strict=True) if b and d]
    arrivals = slowest["arrivals"]
    transfer = arrivals[-1][0] - arrivals[0][0]
    gbps = 8e-9 * slowest["state_bytes"] / transfer if transfer > 0 else 0.0
    left = None if topology is None else _left_gbps(topology, before, peers, len(joined))
    return {
        "seconds": slowest["loaded_at"] - slowest["began"],
        "seconds_each": [answer["loaded_at"] - answer["began"] for answer in joined],
        "manifest_seconds": arrivals[0][0] - slowest["began"],
        "transfer_seconds": transfer,
        "gbps": gbps,
        "links_left_gbps": left,
        "share_of_links": None if left is None else gbps / left,
        "donors": max(answer["donors"] for answer in joined),
        "epochs_missed": max(_missed(answer, trained) for answer in joined),
        "donor_sps_ratio": statistics.median(ratios) if ratios else None,
        "donor_sps_ratio_lowest": min(ratios, default=None),
        "donor_extra_memory_bytes": max(answer["extra_memory_bytes"] for answer in trained),
        "state_bytes": slowest["state_bytes"],
        "received_over_state": (slowest["received_bytes"] - slowest["result_bytes"]) / slowest["state_bytes"],
        **_compared(joined, trained),
        "arrivals": [(at - slowest["began"], size) for at, size in arrivals],
        "donor_epochs": [
            {"at": e["at"] - slowest["began"], "sps": e["local_samples"] / e["seconds"]}
            for e in _epochs(trained[0], float("-inf"), float("inf"))[WARM_UP_EPOCHS:]
        ],
    }


def _epochs(donor: Answer, since: float, until: float) -> list[dict[str, Any]]:
    """The donor's epochs that overlap the time from `since` to `until`; with `since` -inf, those that end
    before `until`.
    """
    return [
        {**e, "seconds": e["at"] - last["at"]}
        for last, e in itertools.pairwise(donor["applied"])
        if e["at"] > since and (last["at"] < until if since > float("-inf") else e["at"] <= until)
    ]


def _rate(epochs: Sequence[dict[str, Any]]) -> float:
    samples: float = sum(e["local_samples"] for e in epochs)
    seconds: float = sum(e["seconds"] for e in epochs)
    return samples / seconds


def _left_gbps(
    topology: Topology, before: Sequence[Sequence[dict[str, Any]]], peers: int, joiners: int
) -> float:
    """The Gb/s of the links of donors and newcomers, less the traffic of a donor's earlier epochs."""
    sent, received = (
        statistics.median(
            8e-9 * sum(e[name] for e in epochs) / sum(e["seconds"] for e in epochs) for epochs in before
        )
        for name in ("bytes_sent", "bytes_received")
    )
    donors, newcomers = topology.hosts[:peers], topology.hosts[peers : peers + joiners]
    egress: float = sum(topology.nodes[host].egress_mbps / 1e3 - sent for host in donors)
    ingress: float = sum(topology.nodes[host].ingress_mbps / 1e3 - received for host in newcomers)
    return min(egress, ingress)


def _missed(joined: Answer, trained: Sequence[Answer]) -> int:
    """Epochs that the swarm began after the transfer ended and before the newcomer contributed."""
    passed = [e["epoch"] + 1 for d in trained for e in d["applied"] if e["at"] <= joined["loaded_at"]]
    return max(0, _first(joined) - max(passed, default=0))


def _first(joined: Answer) -> int:
    """The first epoch that the newcomer contributed to."""
    first: int = min(e["epoch"] for e in joined["applied"] if e["local_samples"] > 0)
    return first


def _compared(joined: Sequence[Answer], trained: Sequence[Answer]) -> dict[str, Any]:
    """Whether all processes hold the same parameters after every epoch that the slowest newcomer applied."""
    parameters = {e["epoch"]: {e["parameters"]} for e in joined[0]["applied"]}
    for answer in (*joined[1:], *trained):
        for e in answer["applied"]:
            if e["epoch"] in parameters:
                parameters[e["epoch"]].add(e["parameters"])
    return {
        "bit_identical": all(len(values) == 1 for values in parameters.values()),
        "epochs_compared": len(parameters),
    }
