"""Inventories by chance, and reports of swarms that never ran."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from p2pavg.forecast.inventory import Inventory, parse
from p2pavg.report import LinkReport, MemberReport, MemoryReport, RoundReport


def inventory(
    seed: int, offers: int | None = None, most: int = 5, regions: int | None = None, backwards: bool = False
) -> Inventory:
    """Offers of four types in up to three regions, with prices and links by chance. backwards: told so."""
    random = np.random.default_rng(seed)
    names = [f"r{i}" for i in range(regions or random.integers(1, 4))]
    kinds = list(itertools.product((f"t{i}" for i in range(4 if regions is None else 6)), names))
    random.shuffle(kinds)
    rows: list[dict[str, Any]] = []
    for kind, region in kinds[: offers or int(random.integers(1, 6))]:
        row: dict[str, Any] = {
            "type": kind,
            "region": region,
            "count": int(random.integers(1, most + 1)),
            "samples_per_second": float(random.uniform(30, 400)),
            "dollars_per_hour": float(random.uniform(0.1, 1.5)),
        }
        if random.random() < 0.5:
            row["up_mbps"] = float(random.uniform(20, 7000))
        rows.append(row)
    links = [
        {
            "between": [a, b],
            "rtt_ms": 0.7 if a == b else float(random.uniform(10, 280)),
            "rate_mbps": 6000.0 if a == b else float(random.uniform(50, 4000)),
            "dollars_per_gb": float(random.choice([0, 0.01, 0.08])),
        }
        for a, b in itertools.combinations_with_replacement(names, 2)
    ]
    job = {
        "target_batch_size": float(random.choice([8192, 32768])),
        "values": float(random.choice([2e7, 2e8, 5.6e8])),
        "delayed": bool(random.random() < 0.3),
    }
    way = -1 if backwards else 1
    return parse({"job": job, "offer": rows[::way], "link": links[::way]})


def report(epoch: int, peer: int, peers: int, **changes: Any) -> RoundReport:
    """An epoch of peers in two regions, 100 ms apart at 400 Mb/s: 6 s of calculation, 2 of communication."""
    names = [f"{i:040x}" for i in range(peers)]
    fields: dict[str, Any] = {
        "run_id": "run",
        "peer": names[peer],
        "epoch": epoch,
        "attempts": 1,
        "leader": names[0],
        "lineage": "00",
        "members": tuple(MemberReport(name, 100.0, 100, True) for name in names),
        "samples": 100 * peers,
        "local_samples": 100,
        "samples_discarded": 0,
        "discarded_why": (),
        "failed_members": (),
        "causes": (),
        "seconds_calculation": 6.0,
        "seconds_waiting": 0.1,
        "seconds_matchmaking": 0.1,
        "seconds_transfer": 1.6,
        "seconds_commit": 0.1,
        "seconds_update": 0.1,
        "seconds_total": 8.0 + 0.02 * (epoch % 3),
        "bytes_sent": 70_000_000,
        "bytes_received": 70_000_000,
        "codec": "fp16",
        "links": tuple(
            LinkReport(name, 70_000_000 // max(1, peers - 1), 0, 4, 0.1, 1_000_000, 4e8)
            for name in names
            if name != names[peer]
        ),
        "region": "eu" if peer % 2 else "us",
        "memory": MemoryReport(6_100_000_000, 16_700_000_000, 11_000_000_000, 15_800_000_000),
    }
    return RoundReport(**{**fields, **changes})


def reports(epochs: int = 8, peers: int = 2) -> list[RoundReport]:
    return [report(epoch, peer, peers) for epoch in range(epochs) for peer in range(peers)]
