"""The sections that are compared with the best part sizes: `shares` and `clouds`."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from bench.line_rate.contestants import WARM_UP, averaging, in_turn
from p2pavg.lab.topology import Topology, load

PAYLOAD = 1448 / 1500  # of the IP bytes of a full segment


def optimum(shape: Topology, peers: int, numel: int) -> float:
    """Seconds that the transfer takes at least: the best part sizes for the true rates,
    by linear programming.

    Peer i owns p_i values: it sends p_j to every owner j, and p_i to everybody; so does everybody else.
    """
    from scipy.optimize import linprog

    hosts = shape.hosts[:peers]
    n, bits = len(hosts), 16 / PAYLOAD
    rows, limits = [], []

    def bound(coefficients: list[float], mbps: float) -> None:
        if mbps:
            rows.append([bits * c for c in coefficients] + [-mbps * 1e6])
            limits.append(0.0)

    for i, host in enumerate(hosts):
        node = shape.nodes.get(host)
        out = [float(n - 1) if j == i else 1.0 for j in range(n)]
        if node is not None:
            bound(out, node.egress_mbps)
            bound(out, node.ingress_mbps)
        for j, other in enumerate(hosts):
            if i != j:
                bound([1.0 if k in (i, j) else 0.0 for k in range(n)], shape.paths[host, other].rate_mbps)
    solved = linprog(
        [0.0] * n + [1.0],
        A_ub=rows,
        b_ub=limits,
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[float(numel)],
        bounds=[(0, None)] * (n + 1),
    )
    return float(solved.x[-1])


def against_optimum(shape: Topology, peers: int, numel: int, rounds: int) -> dict[str, Any]:
    """Parts by bandwidth, where bandwidths differ."""
    warm_up = WARM_UP.get(shape.name, 1)
    row = in_turn({shape.name: partial(averaging, shape, peers, numel)}, rounds, warm_up)[shape.name]
    row["optimum"] = optimum(shape, peers, numel)
    row["over_optimum"] = row["seconds"] / row["optimum"]
    row["first_over_optimum"] = row["first_seconds"] / row["optimum"]
    row["transfer_over_optimum"] = row["phases"]["transfer"] / row["optimum"]
    return row


def shares(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Three fast hosts and a slow home."""
    return against_optimum(load("mixed"), 4, 10_000_000, rounds)


def clouds(rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Every pair has its own rate."""
    shape, scale = load("clouds-4").scaled(options.scale), options.scale
    return {"scale": scale, **against_optimum(shape, 8, int(scale * 25_000_000), rounds)}
